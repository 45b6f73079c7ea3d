"""Ranks that meet anew when others are lost, and a loop that goes on."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

MEMBERSHIP = "fastcomm/launching/membership.py"
ELASTIC = "fastcomm/reducer/features/elastic.py"
ROUND = "fastcomm/reducer/round.py"
REBUILD = "tests/launching/test_rebuild.py::test_"
LOOP = "tests/reducer/features/test_elastic.py::test_"
TOO_LATE = f"{REBUILD}a_rank_that_comes_too_late_joins_the_next_meeting"
WHILE_MEETING = f"{REBUILD}a_rank_may_be_lost_while_they_meet"
MISSED = f"{LOOP}a_rank_that_has_missed_a_step_gets_it_from_one_that_has_not"
TAKEN_IN = f"{LOOP}a_process_in_place_of_a_lost_one_gets_all_that_the_others_have"

MUTATIONS = (
    Mutation(
        name="rebuild: a rank that nobody takes in goes on alone",
        file=MEMBERSHIP,
        within="Membership._meet_anew",
        old="break",
        new="continue",
        tests=(f"{REBUILD}a_rank_that_nobody_takes_in_does_not_go_on_alone",),
    ),
    Mutation(
        name="rebuild: a leader that is lost is waited for",
        file=MEMBERSHIP,
        within="Membership._hold",
        old="leader in map(str, others.lost) or of_others.is_over()",
        new="False",
        tests=(WHILE_MEETING,),
    ),
    Mutation(
        name="rebuild: who waits is not taken in",
        file=MEMBERSHIP,
        within="Membership._decide",
        old="self._point.waiting(absent)",
        new="dict[int, list[Any]]()",
        tests=(f"{REBUILD}a_process_is_taken_in_and_has_the_rank_of_the_lost_one",),
    ),
    Mutation(
        name="rebuild: a rank that lives and does not come is waited for",
        file=MEMBERSHIP,
        within="Membership._hold",
        old="others.are_known or deadline.is_over()",
        new="others.are_known",
        tests=(TOO_LATE,),
    ),
    Mutation(
        name="rebuild: a store that is gone is not opened anew",
        file=MEMBERSHIP,
        within="Membership._meet_anew",
        old="self._point.reopen(timeout)",
        new="pass",
        tests=(f"{REBUILD}another_rank_of_the_host_serves_the_store_when_its_server_is_gone",),
    ),
    Mutation(
        name="rebuild: a note for another process is taken for one's own",
        file=MEMBERSHIP,
        within="arrive",
        old="meeting.own_rank is not None",
        new="True",
        tests=(f"{REBUILD}a_note_for_another_process_is_not_taken_for_ones_own",),
    ),
    Mutation(
        name="elastic: a new process is not behind",
        file=ELASTIC,
        within="compare_ranks",
        old="not membership.is_new and (before is None or not before.is_behind)",
        new="True",
        tests=(TAKEN_IN,),
    ),
    Mutation(
        name="elastic: who was behind has all at the next meeting",
        file=ELASTIC,
        within="compare_ranks",
        old="before is None or not before.is_behind",
        new="True",
        tests=(f"{LOOP}what_nobody_has_any_more_is_an_error",),
    ),
    Mutation(
        name="elastic: the least far tells the others",
        file=ELASTIC,
        within="Behind.__init__",
        old="ranks.index(max(ranks))",
        new="ranks.index(min(ranks))",
        tests=(MISSED,),
    ),
    Mutation(
        name="elastic: optimizers step before they have caught up",
        file=ELASTIC,
        within="Behind.before_step",
        old="raise FastcommError(NOT_CAUGHT_UP)",
        new="pass",
        tests=(f"{LOOP}no_optimizer_steps_before_the_ranks_have_its_state",),
    ),
    Mutation(
        name="elastic: batches of a step that was dropped do not come again",
        file=ELASTIC,
        within="Elastic._take_again",
        old="self._taken + self._again",
        new="[]",
        tests=(f"{LOOP}batches_of_a_step_that_was_abandoned_come_again_on_all_ranks",),
    ),
    Mutation(
        name="elastic: what was accumulated before a loss is gone",
        file=ELASTIC,
        within="Elastic._batches",
        old="have_all is None",
        new="have_all is None and not self._taken.clear()",
        tests=(f"{LOOP}what_was_accumulated_is_made_again_when_a_rank_is_lost",),
    ),
    Mutation(
        name="bootstrap: who died while it waited keeps its rank",
        file="fastcomm/launching/bootstrap.py",
        within="StoreBootstrap._claim_rank",
        old="not has_ended(*process)",
        new="True",
        tests=(
            "tests/launching/test_meeting.py::"
            "test_a_process_that_died_while_it_waited_does_not_keep_its_rank_from_the_next",
        ),
    ),
    Mutation(
        name="elastic: batches of a step that others have made come again",
        file=ELASTIC,
        within="Elastic._batches",
        old="self._n_rounds > n_rounds",
        new="self._n_rounds > n_rounds and not self._again",
        tests=(MISSED,),
    ),
    Mutation(
        name="elastic: the loop ends without a vote",
        file=ELASTIC,
        within="Elastic._vote",
        old="bool(have_batches)",
        new="has_batch",
        tests=(f"{LOOP}the_loop_ends_with_the_first_rank_that_has_no_batch",),
    ),
    Mutation(
        name="elastic: an optimizer steps after a dropped round",
        file="fastcomm/reducer/reducer.py",
        within="Reducer.skipped",
        old="elastic is not None and elastic.outlived is not None",
        new="False",
        tests=(f"{LOOP}what_comes_after_a_dropped_round_of_one_model_is_dropped_with_it",),
    ),
    Mutation(
        name="elastic: a rank that is lost in a backward ends the loop",
        file=ROUND,
        within="Round._outlive_or_raise",
        old="not self._is_outlived(error)",
        new="True",
        tests=(f"{LOOP}the_ranks_that_are_left_go_on",),
    ),
    Mutation(
        name="elastic: a rank that is lost while buckets are planned ends the loop",
        file="fastcomm/reducer/reducer.py",
        within="Reducer._outliving",
        old="not self._outlives(error)",
        new="True",
        tests=(f"{LOOP}a_rank_may_be_lost_while_buckets_are_planned_anew",),
    ),
    Mutation(
        name="run: a rank that has merely lost another is replaced",
        file="fastcomm/launching/runner.py",
        within="_why_not_replaced",
        old="raised is not None and raised.is_lost and not is_new",
        new="False",
        tests=("tests/launching/test_runner.py",),
    ),
)
