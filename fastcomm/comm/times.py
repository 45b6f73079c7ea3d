"""How long ranks wait for each other, and how often who waits looks: the times whose order matters.

    SLICE_S < LONG_SLICE_S < COUNTED_S          else the time of a wait does not count as running
    TICK_S < LOOK_S < ANSWER_S < EXPLAIN_S      idle ranks answer only when they look
    ANSWER_S + VERDICT_S < NAMED_S              the watchdog asks around before the caller gives up
    LOOK_S < TOLD_S < INTERRUPTED_S             ranks read a note before its store may go
    DRIVER_ANSWER_S < COMPARE_S < ANSWER_S      the driver delays no answer by much

tests/comm/test_times.py checks the order.
"""

# ---- who waits looks at the clock: see deadline.py -----------------------------------------------
COUNTED_S = 0.5  # of the time between two looks
SLICE_S = 0.1  # how often who waits looks
LONG_SLICE_S = 4 * SLICE_S  # the same where each look costs a call of Gloo or of the network

# ---- the watchdog --------------------------------------------------------------------------------
TICK_S = 0.1
STALLED_S = 0.2  # a collective that takes longer makes the watchdog look at the peers
LOOK_S = 0.2  # how often it asks for new notes
COMPARE_S = 2.0  # after so long the ranks compare what they are waiting for
ANSWER_S = 2.5  # how long the rank that asks waits for the others' positions
VERDICT_S = 0.5  # how much longer the others that time out wait for what it concludes
DRIVER_ANSWER_S = 1.0  # how long it waits for the driver of the GPU

# ---- over group and hierarchical -----------------------------------------------------------------
NAMED_S = 4.0  # how long the watchdog has to name the missing once a deadline has passed
EXPLAIN_S = 3.0  # how long the watchdog has to find out why a connection broke
SURE_S = 0.8  # the same once all but one have answered, so that this one must have broken it
WAITED_S = 0.5  # how long the thread waits for data before the connections are looked at
TOLD_S = 0.3  # how long ranks that wait take to read a note
# After a failure: by then the thread that found it has ended all works, unless a signal handler's
# exception has interrupted it.
INTERRUPTED_S = 3.0
