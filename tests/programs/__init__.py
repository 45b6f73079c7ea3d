"""Generated programs: of a Reducer over random models, and of collectives; each compared with an
oracle after every operation.

To run one again: `from programs import *`, with tests/ on the path, and replay(...) as a failed
test has printed it. To run many: `make fuzz`.
"""

from programs.batches import *  # noqa: F403
from programs.data import *  # noqa: F403
