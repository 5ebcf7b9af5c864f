"""The barriers of the Hopper kernel, played through on the CPU: no deadlock, and nobody reads what is not there.

Each role of `onchip.backends.hopper.kernel` is a generator that yields what it waits for; a scheduler lets them run in
random orders, and loads end at random times. What the model is for is shown by planted faults, each of which it finds.
"""

import random

import pytest

from onchip.backends.hopper.table import TABLE, Config

CONFIGS = [c._replace(persistent=p) for c in dict.fromkeys(TABLE.values()) for p in (False, True)]
VISITS = [
    (1,),
    (2, 1, 3),
    (5, 1, 1, 2),
    (3, 3, 4),
]  # blocks of keys of a program's tiles, one after the other


class Fault(Exception):
    """What must not happen happened."""


class Mbarrier:
    """So many arrivals, and the loads that they expect, end a phase."""

    def __init__(self, count=1):
        self.phase, self.count, self.missing, self.loads = 0, count, count, 0

    def expect(self):
        if self.missing == 0:
            raise Fault("expected twice in one phase")
        self.missing, self.loads = self.missing - 1, self.loads + 1

    def arrive(self):
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
    def __init__(self, config: Config, visits, share_q, fault=None):
        self.config, self.visits, self.share_q, self.fault = config, visits, share_q, fault
        self.number, self.number_full = None, Mbarrier()
        self.number_empty = Mbarrier(config.warpgroups)
        groups, stages = config.warpgroups, config.stages
        self.q, self.k, self.v = Memory(groups), Memory(stages), Memory(stages)
        self.q_full, self.q_empty = ([Mbarrier() for _ in range(groups)] for _ in range(2))
        self.k_full, self.v_full = ([Mbarrier() for _ in range(stages)] for _ in range(2))
        self.k_empty, self.v_empty = ([Named(groups + 1) for _ in range(stages)] for _ in range(2))
        self.turn = [Named(2) for _ in range(groups)]
        self.flying = []  # loads under way

    def load_into(self, barrier, memory, slot, name):
        barrier.expect()
        memory.overwrite(slot)
        self.flying.append((barrier, memory, slot, name))

    def join(self, barrier, who):
        generation = barrier.come(who)
        return lambda: barrier.generation > generation

    def loader(self):
        stages = self.config.stages + (self.fault == "loader has another ring")
        k_at, v_at = Cursor(min(stages, self.config.stages)), Cursor(self.config.stages)
        if self.fault == "loader has another ring":
            k_at = Cursor(max(self.config.stages - 1, 1))
        q_phase = 1
        for t, blocks in enumerate(self.visits):
            for w in range(self.config.warpgroups):
                if self.config.persistent and self.fault != "queries are not awaited":
                    yield lambda w=w, p=q_phase: self.q_empty[w].passed(p)
                self.load_into(self.q_full[w], self.q, w, t)
            q_phase ^= 1
            for position in range(blocks + 1):
                if position < blocks:
                    yield self.join(self.k_empty[k_at.slot], "loader")
                    self.load_into(self.k_full[k_at.slot], self.k, k_at.slot, (t, position))
                    k_at.next()
                if position > 0:
                    if self.fault != "loader does not wait":
                        yield self.join(self.v_empty[v_at.slot], "loader")
                    self.load_into(self.v_full[v_at.slot], self.v, v_at.slot, (t, position - 1))
                    v_at.next()
            if self.config.persistent:  # the number of the next tile
                if self.fault != "number is overwritten":
                    yield lambda p=1 - t % 2: self.number_empty.passed(p)
                self.number = t + 1
                self.number_full.arrive()
        for _ in range(self.config.stages):
            yield self.join(self.k_empty[k_at.slot], "loader")
            yield self.join(self.v_empty[v_at.slot], "loader")
            k_at.next()
            v_at.next()

    def warpgroup(self, w):
        config, groups = self.config, self.config.warpgroups
        k_at, v_at = (Cursor(config.stages, self.fault == "phase is not turned") for _ in range(2))
        q_phase, me = 0, f"warpgroup {w}"
        for slot in range(config.stages):
            self.k_empty[slot].come(me)
            self.v_empty[slot].come(me)
        if config.ping_pong and w == groups - 1:
            self.turn[0].come(me)
        for t, blocks in enumerate(self.visits):
            yield lambda p=q_phase: self.q_full[w].passed(p)
            q_phase ^= 1
            yield lambda: self.k_full[k_at.slot].passed(k_at.phase)
            self.q.read(w, t)
            self.k.read(k_at.slot, (t, 0))
            yield None
            self.k.end(k_at.slot, (t, 0))
            self.k_empty[k_at.slot].come(me)
            k_at.next()
            if blocks > 1:
                yield lambda: self.k_full[k_at.slot].passed(k_at.phase)
            yield lambda: self.v_full[v_at.slot].passed(v_at.phase)
            for j in range(1, blocks):
                if config.ping_pong:
                    yield self.join(self.turn[w], me)
                self.k.read(k_at.slot, (t, j))
                self.v.read(v_at.slot, (t, j - 1))
                if config.ping_pong:
                    self.turn[w if self.fault == "turn goes to itself" else (w + 1) % groups].come(me)
                yield None
                self.k.end(k_at.slot, (t, j))
                if not (self.fault == "keys are kept" and j == 1 and w == 0):
                    self.k_empty[k_at.slot].come(me)
                k_at.next()
                early = self.fault == "values are released early"
                if early:
                    self.v_empty[v_at.slot].come(me)
                yield None
                if j + 1 < blocks:
                    yield lambda: self.k_full[k_at.slot].passed(k_at.phase)
                slot = v_at.slot
                v_at.next()
                if self.fault != "values are not awaited":
                    yield lambda: self.v_full[v_at.slot].passed(v_at.phase)
                self.v.end(slot, (t, j - 1))
                if not early:
                    self.v_empty[slot].come(me)
            if config.persistent and not self.share_q:
                self.q.end(w, t)
                self.q_empty[w].arrive()
            self.v.read(v_at.slot, (t, blocks - 1))
            yield None
            self.v.end(v_at.slot, (t, blocks - 1))
            self.v_empty[v_at.slot].come(me)
            v_at.next()
            yield None  # the output is written
            if not config.persistent or self.share_q:
                self.q.end(w, t)
            if config.persistent and self.share_q:
                self.q_empty[w].arrive()
            if config.persistent:
                yield lambda p=t % 2: self.number_full.passed(p)
                if self.number != t + 1:
                    raise Fault(f"{me} goes on with tile {self.number}, expected {t + 1}")
                self.number_empty.arrive()
        if config.ping_pong and w == 0 and self.fault != "last turn is not taken":
            yield self.join(self.turn[0], me)

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
        for barrier in (*self.k_empty, *self.v_empty, *self.turn):
            if barrier.here:
                raise Fault("a barrier is left half counted")


def visits_of(config):
    """A program that is not persistent has one tile."""
    return VISITS if config.persistent else [(n,) for n in (1, 2, 3, 6)]


@pytest.mark.parametrize("share_q", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_deadlock_and_no_stale_data(config, share_q):
    for visits in visits_of(config):
        for seed in range(40):
            Program(config, visits, share_q).run(seed)


FAULTS = {
    "loader has another ring": lambda c: True,
    "loader does not wait": lambda c: True,
    "phase is not turned": lambda c: True,
    "keys are kept": lambda c: True,
    "values are released early": lambda c: True,
    "values are not awaited": lambda c: True,
    "queries are not awaited": lambda c: c.persistent,
    "number is overwritten": lambda c: c.persistent,
    "turn goes to itself": lambda c: c.ping_pong,
    "last turn is not taken": lambda c: c.ping_pong,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_planted_faults_are_found(config, fault):
    if not FAULTS[fault](config):
        return
    for visits in [*visits_of(config), (9,)]:
        for seed in range(200):
            try:
                Program(config, visits, True, fault).run(seed)
            except Fault:
                return
    pytest.fail("the model did not see the fault")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_named_barriers_are_enough(config):
    """There are 16, of which Triton takes 5: two for each slot, and the turns."""
    assert 5 + 2 * config.stages + (config.warpgroups if config.ping_pong else 0) <= 16
