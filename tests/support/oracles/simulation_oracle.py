"""What the simulator and the memory figures are held against: plain Python, a heap of events, and
dictionaries.

Shares no code with `engine`: what waits for what follows from the meaning of (kind, stage,
micro-batch), and time passes event by event. Kinds are F forward, B backward, I input gradient, W
weight gradient, E encode ahead.
"""

import heapq
from collections import defaultdict, deque


class StandstillError(Exception):
    """Nothing happens any more, though actions are left; holds the first of each rank that never
    began.
    """


class Pipeline:
    """A step of a pipeline: run it once.

    `orders[rank]` are the rank's actions (kind, stage, micro_batch). `durations[action]` is an
    action's time, `travel[kind, stage, micro_batch]` that of what it makes for another rank.
    `wants_grad[stage]` says whether a gradient comes back to a stage from the next.
    """

    def __init__(self, orders, durations, travel, wants_grad):
        self.orders, self.durations, self.travel, self.wants_grad = (
            orders,
            durations,
            travel,
            wants_grad,
        )
        self.rank_of = {action: rank for rank, order in enumerate(orders) for action in order}
        self.events, self.counter = [], 0
        self.position, self.is_busy = [0] * len(orders), [False] * len(orders)
        self.mailbox = [set() for _ in orders]
        self.waiting_to_go = defaultdict(deque)
        self.is_on_the_way = defaultdict(bool)
        self.times = {}

    def run(self):
        """-> {action: (start, end)}."""
        for rank in range(len(self.orders)):
            self.begin(rank, 0)
        while self.events:
            now, _, what, arguments = heapq.heappop(self.events)
            what(now, *arguments)
        if len(self.times) < len(self.rank_of):
            left = [
                (rank, order[self.position[rank]])
                for rank, order in enumerate(self.orders)
                if self.position[rank] < len(order)
            ]
            raise StandstillError(left)
        return self.times

    def later(self, when, what, *arguments):
        heapq.heappush(self.events, (when, self.counter, what, arguments))
        self.counter += 1

    def begin(self, rank, now):
        """Start the rank's next action if it is free and has everything."""
        if self.is_busy[rank] or self.position[rank] == len(self.orders[rank]):
            return
        action = self.orders[rank][self.position[rank]]
        if self.needs(action) <= self.mailbox[rank]:
            self.is_busy[rank] = True
            self.times[action] = now, now + self.durations[action]
            self.later(now + self.durations[action], self.end, rank, action)

    def end(self, now, rank, action):
        self.is_busy[rank] = False
        self.position[rank] += 1
        for thing, target in self.makes(action):
            if target == rank:
                self.mailbox[rank].add(thing)
            else:
                self.waiting_to_go[rank, target].append((thing, self.travel[action]))
                self.depart(now, rank, target)
        self.begin(rank, now)

    def depart(self, now, rank, target):
        way = rank, target
        if self.waiting_to_go[way] and not self.is_on_the_way[way]:
            thing, takes = self.waiting_to_go[way].popleft()
            self.is_on_the_way[way] = True
            self.later(now + takes, self.arrive, rank, target, thing)

    def arrive(self, now, rank, target, thing):
        self.is_on_the_way[rank, target] = False
        self.mailbox[target].add(thing)
        self.depart(now, rank, target)
        self.begin(target, now)

    def needs(self, action):
        kind, stage, number = action
        if kind == "F":
            if stage > 0:
                return {("output", stage - 1, number)}
            return {("features", number)} if ("E", 0, number) in self.rank_of else set()
        if kind in "BI":
            gradient = {("gradient", stage + 1, number)} if self.wants_grad[stage] else set()
            return gradient | {("activations", stage, number)}
        return {("half", stage, number)} if kind == "W" else set()

    def makes(self, action):
        """What an action makes, and for which rank."""
        kind, stage, number = action
        if kind == "E":
            yield ("features", number), self.rank_of["F", 0, number]
        if kind == "F":
            yield ("activations", stage, number), self.rank_of[action]
            if ("F", stage + 1, number) in self.rank_of:
                yield ("output", stage, number), self.rank_of["F", stage + 1, number]
        if kind in "BI" and stage > 0 and self.wants_grad[stage - 1]:
            before = next(
                a for a in (("B", stage - 1, number), ("I", stage - 1, number)) if a in self.rank_of
            )
            yield ("gradient", stage, number), self.rank_of[before]
        if kind == "I":
            yield ("half", stage, number), self.rank_of[action]


class RankMemory:
    """One rank's memory, allocation by allocation. `layers` gives each layer's bytes for a
    micro-batch.
    """

    def __init__(self, state, costs, recompute):
        self.saved, self.kept, self.recompute = costs.saved_bytes, costs.kept_bytes, recompute
        self.working, self.deferred = costs.working_bytes, costs.deferred_bytes
        self.of_input, self.of_weight = costs.input_working_bytes, costs.weight_working_bytes
        self.state, self.held = state, {}
        self.peak = state

    @property
    def live(self):
        return self.state + sum(self.held.values())

    def hold(self, layer, number, size, on_top=0):
        self.held[layer, number] = size
        self.peak = max(self.peak, self.live + on_top)

    def whole(self, layer, number):
        """Everything of a layer: the activations, and its input if that alone was kept."""
        saved, kept = self.saved[layer][number], self.kept[layer][number]
        return max(saved, kept) if self.recompute[layer] else saved

    def run(self, action, layers):
        """-> bytes that are live afterwards. `layers` are the numbers of the stage's layers."""
        kind, _, number = action
        if kind == "F":
            for layer in layers:
                working = min(self.working[layer][number], self.of_input[layer][number])
                self.hold(layer, number, self.whole(layer, number), working)
                self.hold(
                    layer,
                    number,
                    (self.kept if self.recompute[layer] else self.saved)[layer][number],
                )
        if kind in "BI":
            for layer in reversed(layers):
                working, later = self.working[layer][number], self.deferred[layer][number]
                if kind == "B":
                    self.hold(layer, number, self.whole(layer, number), working)
                    del self.held[layer, number]
                else:
                    working = self.of_input[layer][number]
                    self.hold(layer, number, max(self.whole(layer, number), later), working)
                    self.hold(layer, number, later)
        if kind == "W":
            for layer in layers:
                later, working = self.held[layer, number], self.of_weight[layer][number]
                self.hold(layer, number, later, working)
                del self.held[layer, number]
        return self.live
