"""ShardedOptimizer: shares, pieces, their state, and torch's helpers."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SHARES = "fastcomm/reducer/shares.py"
SHARDED = "fastcomm/reducer/sharded.py"
GROUPS = "fastcomm/reducer/param_groups.py"
CHECKPOINTS = "fastcomm/reducer/checkpoints.py"
NORMS = "fastcomm/reducer/norms.py"
LAYOUT = "fastcomm/reducer/layout.py"
HELPERS = "fastcomm/reducer/torch_helpers.py"

TESTS = ("tests/reducer/test_sharded.py",)
STATE_TESTS = ("tests/reducer/test_sharded_state.py", "tests/reducer/test_sharded_failures.py")

MUTATIONS = (
    Mutation(
        name="sharded: unused parameters are stepped with old gradients",
        file=SHARES,
        old="piece.gradient if is_present else None",
        new="piece.gradient",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: a second round overwrites gradients",
        file=SHARES,
        old="        self.is_pending = True\n",
        new="",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: gradients of no_sync() are passed over",
        file=SHARES,
        old="            elif gradient is not None:\n",
        new="            elif False:\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: kept gradients that were replaced are not stepped",
        file=SHARES,
        old="                    views[i].copy_(gradient)\n",
        new="                    pass\n",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: matrices of unknown optimizers are cut",
        file=SHARES,
        old="        if not self.cuts:\n",
        new="        if False:\n",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: all whole parameters are stepped by rank 0",
        file=LAYOUT,
        old="    goal = (sum(loads) + layout.numel) / n\n",
        new="    goal = float('inf')\n",
        tests=("tests/reducer/test_layout.py",),
    ),
    Mutation(
        name="sharded: what schedulers change is not seen",
        file=SHARDED,
        old="            inner.update(options_of(group))\n",
        new="            pass\n",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: parameters stay with their owner",
        file=SHARDED,
        old="            self._spread()\n",
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: a step that raises leaves the other ranks waiting",
        file=SHARDED,
        old="            self.comm.abandon()\n",
        new="",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a failed step keeps gradients that refresh() refuses to lose",
        file=SHARDED,
        old="        if self.is_torn:\n            self._drop()\n        elif",
        new="        if",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a rank refuses a refresh() alone",
        file=SHARDED,
        old="        except FastcommError as error:\n            problem = error\n",
        new="        except FastcommError:\n            raise\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a tensor of options belongs to the saved state, too",
        file=SHARDED,
        old="copy.deepcopy(options_of(theirs))",
        new="options_of(theirs)",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a transposed parameter is stepped by a gradient that is not",
        file=SHARES,
        old=" and parameter.stride() == view.stride()",
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: refresh() forgets the state",
        file=SHARDED,
        old="        inner.state.update(states)\n",
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: refresh() forgets the state of frozen parameters",
        file=SHARDED,
        old="{p: state for p, state in self._aside.items() if p not in self._parts}",
        new="{}",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a state that is loaded leaves out frozen parameters",
        file=SHARDED,
        old="for p, s in saved.states.items() if p not in self._parts}",
        new="for p, s in saved.states.items() if False}",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a parameter that was moved is stepped with its old group's options",
        file=SHARDED,
        old="if not param_groups.have(self.param_groups, self._members):",
        new="if False:",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: groups of as many parameters are taken for those they were",
        file="fastcomm/reducer/param_groups.py",
        old=' and all(map(operator.is_, group["params"], own))',
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: parts of different times are loaded",
        file=SHARDED,
        old="self._all_parts(), inner.state, _LOADING",
        new="[], {}, _LOADING",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: ranks load different states",
        file=SHARDED,
        old="agreement.compare(self.comm, problem, described, [], _LOADING)",
        new="agreement.compare(self.comm, problem, {}, [], _LOADING)",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: one rank loads its part, and another the whole state",
        file=CHECKPOINTS,
        old='"the whole" if saved.is_whole else "one rank\'s part"',
        new='"a state"',
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a step that has mixed the state is forgotten by refresh()",
        file=SHARES,
        old="    if is_mixed and has_state:\n",
        new="    if False:\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a user's barrier meets that of a step",
        file=SHARES,
        old="            self._comm.spread_shares(self._token, self._bounds).wait()\n",
        new="            self._comm.barrier()\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: what one rank has loaded stays where another could not",
        file=SHARDED,
        old="        groups, inner, aside = loaded\n",
        new="        groups, inner, aside = loaded\n        self._inner = inner\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="objects: ranks that make different calls read each other's objects",
        file="fastcomm/objects.py",
        old="        if theirs != first:\n",
        new="        if False:\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a rank steps before the others have come to their step",
        file=SHARDED,
        old="            if not self.comm.has_streams:\n",
        new="            if self.sharding.shares_parameters:\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a rank alone does not take the new buckets",
        file=SHARDED,
        old="        agreement.compare(self.comm, problem, self._places(), [], _TAKING)\n",
        new="        if problem: raise problem\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: an optimizer that was not made holds the reducer",
        file=SHARDED,
        old="            reducer.sharded_by = ShardedBy()  # of nothing that is half made\n",
        new="",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a refresh() that fails ends the optimizer",
        file="fastcomm/reducer/reducer.py",
        old="        self._release()  # whatever attach() has left\n",
        new="        self.detach()\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="errors: the call that a collective is made by is not named",
        file="fastcomm/objects.py",
        old='        named.args = (f"{error} (in {call}, which every rank must call)",)\n',
        new="",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: a buffer on a parameter's memory is left behind",
        file=SHARDED,
        old="[*reducer._named_parameters(), *buffers]",
        new="reducer._named_parameters()",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: the norm is that of one rank's share",
        file=NORMS,
        old="    comm.all_reduce(square_sum)\n",
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: each rank has its own verdict on infinities",
        file=HELPERS,
        old='        holder.comm.all_reduce(number, "max")\n',
        new="",
        tests=TESTS,
    ),
    Mutation(
        name="sharded: the state is cut in the order of indices, not of memory",
        file=CHECKPOINTS,
        old="    return in_memory_order(_empty_like(parameter, tensor.dtype).copy_(tensor))\n",
        new="    return tensor.reshape(-1)\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: numbers that became strings are not found in a saved state",
        file=CHECKPOINTS,
        old="    return {known[str(key)]: state for key, state in",
        new="    return {key: state for key, state in",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: ranks number new parameters in different orders",
        file=GROUPS,
        old="            if parameter in names:\n",
        new="            if False:\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: check_in_sync() finds another order on one rank alone",
        file=SHARDED,
        old='        self._compare_places("check_in_sync()")\n',
        new="",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: torch's checkpoint takes a rank's pieces for the whole",
        file=HELPERS,
        old='    if asking.startswith("torch.distributed.checkpoint."):\n',
        new="    if False:\n",
        tests=STATE_TESTS,
    ),
    Mutation(
        name="sharded: the state that a frozen parameter begins with is dropped",
        file=SHARDED,
        old=" = dict(plain.state)\n",
        new=" = {}\n",
        tests=STATE_TESTS,
    ),
)
