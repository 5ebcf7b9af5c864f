"""The barriers of the Hopper kernel, played through on the CPU: no deadlock, and nobody reads what is not there.

Each role of `onchip.backends.hopper.kernel` is a generator that yields what it waits for; a scheduler lets them run in
random orders, and loads end at random times. What the model is for is shown by planted faults, each of which it finds.
"""

import random

import pytest

from onchip.backends.hopper.table import TABLE, Config, keys_free, turn_of, values_free

# One of each kind that the model can tell apart.
CONFIGS = list({(row.warpgroups, row.stages): row for row in TABLE.values()}.values())
# Blocks of keys of a program's tiles, one after the other; none where the program's sequence has no rows.
VISITS = [(), (1,), (2,), (6,), (1, 1, 1, 1), (2, 1, 3), (5, 1, 1, 2), (3, 3, 4), (1, 4, 2, 2, 9, 1)]


class Fault(Exception):
    """What must not happen happened."""


class Mbarrier:
    """So many arrivals, and the loads that they expect, end a phase."""

    def __init__(self, count=1):
        self.phase, self.count, self.missing, self.loads = 0, count, count, 0

    def expect(self, loads):
        if self.missing == 0:
            raise Fault("expected twice in one phase")
        self.missing, self.loads = self.missing - 1, self.loads + loads

    def arrive(self):
        if self.missing == 0:
            raise Fault("arrived twice in one phase")
        self.missing -= 1
        self._end()

    def complete(self):
        self.loads -= 1
        self._end()

    def _end(self):
        if self.missing == 0 and self.loads == 0:
            self.phase, self.missing = self.phase ^ 1, self.count

    def passed(self, parity):
        return self.phase != parity


class Named:
    """A hardware barrier of `parties`: some arrive and go on, some wait."""

    def __init__(self, parties):
        self.parties, self.here, self.generation = parties, set(), 0

    def come(self, who):
        """Arrive; returns the generation to wait for."""
        if who in self.here:
            raise Fault(f"{who} came twice to a barrier")
        self.here.add(who)
        generation = self.generation
        if len(self.here) == self.parties:
            self.here, self.generation = set(), generation + 1
        return generation


class Memory:
    """Slots that hold the name of a tile's data; they may not be loaded while somebody reads."""

    def __init__(self, slots):
        self.data = [None] * slots
        self.readers = [0] * slots

    def read(self, slot, expected):
        if self.data[slot] != expected:
            raise Fault(f"slot {slot} holds {self.data[slot]}, expected {expected}")
        self.readers[slot] += 1

    def end(self, slot, expected):
        self.readers[slot] -= 1
        if self.data[slot] != expected:
            raise Fault(f"slot {slot} was overwritten while it was read")

    def overwrite(self, slot):
        if self.readers[slot]:
            raise Fault(f"slot {slot} is loaded while it is read")
        self.data[slot] = None


class Cursor:
    def __init__(self, slots, stuck=False):
        self.slot, self.phase, self.slots, self.stuck = 0, 0, slots, stuck

    def next(self):
        self.slot += 1
        if self.slot == self.slots:
            self.slot = 0
            self.phase ^= 0 if self.stuck else 1


class Program:
    """One program and the tiles it takes; `share_q`: the output leaves through the queries' memory.

    `blank`: the (warpgroup, tile) pairs whose first block shows nothing, so that the step has values only.
    """

    def __init__(self, config: Config, visits, share_q, fault=None, blank=()):
        self.config, self.visits, self.share_q, self.blank = config, visits, share_q, blank
        self.fault = fault
        self.tile, self.tile_full = None, Mbarrier()
        self.tile_free = Mbarrier(config.warpgroups)
        groups, stages = config.warpgroups, config.stages
        self.held, self.q = Memory(groups), Memory(2 * groups)
        self.k, self.v = Memory(stages), Memory(stages)
        self.q_full, self.q_free = ([Mbarrier() for _ in range(groups)] for _ in range(2))
        self.full = [Mbarrier(2) for _ in range(stages)]
        self.k_free, self.v_free = ([Named(groups + 1) for _ in range(stages)] for _ in range(2))
        self.turn = [Named(2) for _ in range(groups)]
        self.flying = []  # loads under way

    def load_into(self, barrier, *targets):
        """Loads of [memory, slot, name], one arrival for all."""
        barrier.expect(len(targets))
        for memory, slot, name in targets:
            memory.overwrite(slot)
            self.flying.append((barrier, memory, slot, name))

    def join(self, barrier, who):
        generation = barrier.come(who)
        return lambda: barrier.generation > generation

    def publish(self, t):
        if self.fault != "the next tile is overwritten":
            yield lambda: self.tile_free.passed(1 - t % 2)
        self.tile = t
        self.tile_full.arrive()

    def load_queries(self, t):
        for w in range(self.config.warpgroups):
            if self.fault != "queries are not awaited":
                yield lambda w=w: self.q_free[w].passed(1 - t % 2)
            slot = t % 2 * self.config.warpgroups + w
            self.load_into(self.q_full[w], (self.held, w, t), (self.q, slot, t))

    def load_block(self, free, at, *target):
        if self.fault != "loader does not wait":
            yield self.join(free[at.slot], "loader")
        if target:
            memory, name = target
            self.load_into(self.full[at.slot], (memory, at.slot, name))
        else:
            self.full[at.slot].arrive()

    def loader(self):
        at = Cursor(self.config.stages - (self.fault == "loader has another ring"))
        yield from self.publish(0)
        early, last = False, None
        for t, blocks in enumerate(self.visits):
            for position in range(blocks):
                yield from self.load_block(self.k_free, at, self.k, (t, position))
                if position == 0 and not early:
                    yield from self.load_queries(t)
                yield from self.load_block(self.v_free, at, *((self.v, last) if last else ()))
                at.next()
                last = t, position
                if position == blocks - 2:
                    yield from self.publish(t + 1)
                    if t + 1 < len(self.visits):
                        yield from self.load_queries(t + 1)
            early = blocks > 1
            if not early:
                yield from self.publish(t + 1)
        if self.visits or self.fault == "a first slot is awaited without a tile":
            yield from self.load_block(self.k_free, at)
            yield from self.load_block(self.v_free, at, *((self.v, last) if last else ()))
            at.next()
        for _ in range(self.config.stages):
            yield self.join(self.k_free[at.slot], "loader")
            yield self.join(self.v_free[at.slot], "loader")
            at.next()

    def warpgroup(self, w):
        config, groups = self.config, self.config.warpgroups
        at, me = Cursor(config.stages, self.fault == "phase is not turned"), f"warpgroup {w}"
        for slot in range(config.stages):
            self.release(me, slot)
        if w == groups - 1:
            self.turn[0].come(me)
        yield from self.next_tile(me, 0)
        for t, blocks in enumerate(self.visits):
            yield from self.take_queries(w, t)
            for j in range(blocks):
                before = (t, j - 1) if j else (t - 1, self.visits[t - 1] - 1)
                if j == 0 and t > 0 and (w, t) in self.blank:
                    yield from self.values_only(
                        me, w, at, before, self.fault == "a step without scores has no turn"
                    )
                else:
                    yield from self.step(me, w, at, (t, j), before)
                if j == 0 and t > 0:
                    yield from self.finish(w, t - 1)
                if j == blocks - 1:
                    self.q.end(t % 2 * groups + w, t)
            yield from self.next_tile(me, t + 1)
        if self.visits:
            last = len(self.visits) - 1, self.visits[-1] - 1
            yield from self.values_only(me, w, at, last, True)
            yield from self.finish(w, last[0])
        if w == 0 and self.fault != "last turn is not taken":
            yield self.join(self.turn[0], me)

    def release(self, me, slot):
        self.k_free[slot].come(me)
        self.v_free[slot].come(me)

    def next_tile(self, me, expected):
        yield lambda: self.tile_full.passed(expected % 2)
        if self.tile != expected:
            raise Fault(f"{me} goes on with tile {self.tile}, expected {expected}")
        self.tile_free.arrive()

    def take_queries(self, w, t):
        yield lambda: self.q_full[w].passed(t % 2)
        self.held.read(w, t)
        yield None
        self.held.end(w, t)
        self.q.read(t % 2 * self.config.warpgroups + w, t)
        if not self.share_q or t == 0:
            self.q_free[w].arrive()

    def step(self, me, w, at, keys, values):
        """Scores of a block, and the values of the block before it, if there is one."""
        first, slot, phase = values[0] < 0, at.slot, at.phase
        if self.fault != "slots are not awaited":
            yield lambda: self.full[slot].passed(phase)
        if not first:
            yield self.join(self.turn[w], me)
        self.k.read(slot, keys)
        if not first:
            self.v.read(slot, values)
            self.turn[w if self.fault == "turn goes to itself" else (w + 1) % self.config.warpgroups].come(me)
        yield None
        if self.fault == "values are released with the keys":
            self.v_free[slot].come(me)
        self.k.end(slot, keys)
        self.k_free[slot].come(me)
        yield None
        if not first:
            self.v.end(slot, values)
        kept = self.fault == "a slot is kept" and keys[1] == 1 and w == 0
        if not kept and self.fault != "values are released with the keys":
            self.v_free[slot].come(me)
        at.next()

    def values_only(self, me, w, at, values, last):
        yield lambda: self.full[at.slot].passed(at.phase)
        if not last:
            yield self.join(self.turn[w], me)
        self.v.read(at.slot, values)
        if not last:
            self.turn[(w + 1) % self.config.warpgroups].come(me)
        yield None
        self.v.end(at.slot, values)
        self.release(me, at.slot)
        at.next()

    def finish(self, w, t):
        """The output is written, where the tile's queries were if it has no place of its own."""
        slot = t % 2 * self.config.warpgroups + w
        if self.share_q:
            for memory, at in ((self.held, w), (self.q, slot)):
                memory.overwrite(at)
                memory.readers[at] += 1
        yield None
        if self.share_q:
            for memory, at in ((self.held, w), (self.q, slot)):
                memory.readers[at] -= 1
            self.q_free[w].arrive()

    def run(self, seed):
        """Everything in a random order; Fault where it ends wrongly."""
        dice = random.Random(seed)
        roles = [self.loader(), *(self.warpgroup(w) for w in range(self.config.warpgroups))]
        waits = dict.fromkeys(roles)
        while waits:
            ready = [role for role, wait in waits.items() if wait is None or wait()]
            if not ready and not self.flying:
                raise Fault("deadlock")
            if self.flying and (not ready or dice.random() < 0.3):
                barrier, memory, slot, name = self.flying.pop(dice.randrange(len(self.flying)))
                memory.data[slot] = name
                barrier.complete()
                continue
            role = dice.choice(ready)
            try:
                waits[role] = next(role)
            except StopIteration:
                del waits[role]
        for barrier in (*self.k_free, *self.v_free, *self.turn):
            if barrier.here:
                raise Fault("a barrier is left half counted")


@pytest.mark.parametrize("share_q", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_deadlock_and_no_stale_data(config, share_q):
    for visits in VISITS:
        for seed in range(40):
            Program(config, visits, share_q).run(seed)
            Program(config, visits, share_q, blank=some_blank(config, visits, seed)).run(seed)


def some_blank(config, visits, seed):
    """First blocks of some tiles, which show nothing to some warpgroups; never to the last one."""
    dice = random.Random(seed)
    return {(w, t) for w in range(config.warpgroups - 1) for t in range(len(visits)) if dice.random() < 0.5}


FAULTS = [
    "loader has another ring",
    "loader does not wait",
    "phase is not turned",
    "a slot is kept",
    "values are released with the keys",
    "slots are not awaited",
    "queries are not awaited",
    "the next tile is overwritten",
    "a first slot is awaited without a tile",
    "turn goes to itself",
    "last turn is not taken",
    "a step without scores has no turn",
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_planted_faults_are_found(config, fault):
    for visits in [*VISITS, (9,), (2, 2, 2, 2)]:
        for seed in range(200):
            try:
                Program(config, visits, True, fault, some_blank(config, visits, seed)).run(seed)
            except Fault:
                return
    pytest.fail("the model did not see the fault")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_named_barriers_are_enough(config):
    """There are 16, of which Triton takes 5: two for each slot, and the turns."""
    slots = [free(config.stages) + slot for slot in range(config.stages) for free in (keys_free, values_free)]
    turns = [turn_of(config.stages) + w for w in range(config.warpgroups)]
    assert min(slots) == 5 and len({*slots, *turns}) == len(slots + turns)
    assert max(turns) < 16
