"""Generated programs: of a Reducer over random models, and of collectives; each compared with an
oracle after every operation.

To run one again: `from tests.programs import *` and replay(...) as a failed test has printed it. To
run many: `make soak`.
"""

from tests.programs.batches import *  # noqa: F403
from tests.programs.data import *  # noqa: F403
