"""Many ranks as threads of one process that take turns: 64 or 256 ranks without as many processes.

One rank runs at a time, until it waits for others. So every run is the same, and a deadlock shows at once: no rank can
run. The process group is stricter than gloo and NCCL:

- Every call waits for its partners, a send for its receive. Only those of one ``batch_isend_irecv`` start together.
  This is NCCL's order, where the messages of a group follow each other on one stream.
- Partners must agree on operation, data type and size.
- A message of a batch never meets a single one. For NCCL without a bound device they use different communicators.
- A result is written when the caller waits for it, so a missing wait leaves the old values.

Neither of torch's own tools does this (2.13):

- ``LocalTensorMode`` runs the program once for all ranks. A rank is then a ``LocalIntNode``, which cannot index
  vitpar's layouts ("'LocalIntNode' object has no attribute 'int_'"); ``ProcessGroup.rank()`` is 0 for all (upstream:
  pytorch#177190); and the stages of a pipeline are different programs.
- The process group of ``MultiThreadedTestCase`` has no sends and receives, compares nothing, and hangs in a deadlock.
"""

import gc
import threading
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

REDUCTIONS = {"SUM": torch.sum, "MAX": torch.amax, "MIN": torch.amin}
Given = list[Tensor]
"""Tensors that a rank gives to a collective, or takes from it."""


class WrongMessages(AssertionError):
    """A deadlock, or two ranks that disagree about a message."""


class _Stopped(BaseException):
    """Ends the other ranks after a failure."""


class Turns:
    """The ranks of a world, one of which runs."""

    def __init__(self, size: int) -> None:
        self._unfinished = size
        # Plain locks, held until it is their rank's turn: a Semaphore wakes threads more often.
        self._batons = [threading.Lock() for _ in range(size)]
        for baton in self._batons:
            baton.acquire()
        self._ready, self._waiting = deque(range(size)), dict[int, Callable[[], str]]()
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self.meetings: dict[Any, _Meeting] = {}
        """Collectives that ranks wait in."""
        self.posts: defaultdict[Any, deque[_Post]] = defaultdict(deque)
        """Sends and receives without their partners."""

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Return ``function(rank)`` of every rank, which runs in a world of its own.

        Changes torch's process groups for good: call it in a fork.
        """
        gc.disable()  # a tenth of the time
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        distributed_c10d._world = ThreadLocalWorld()
        dist.batch_isend_irecv = _batch
        size = self._unfinished
        results: list[Any] = [None] * size

        def turn(rank: int) -> None:
            self._batons[rank].acquire()
            try:
                if self._failure is None:
                    torch.set_num_threads(1)
                    _THIS.turns = self
                    # The store is of this rank alone: it has nothing to tell the others.
                    dist.init_process_group("turns", rank=rank, world_size=size, store=dist.HashStore())
                    results[rank] = function(rank)
            except _Stopped:
                pass
            except BaseException as error:
                known = isinstance(error, WrongMessages)
                self._fail(error if known else AssertionError(f"rank {rank}:\n{traceback.format_exc()}"))
            finally:
                self._unfinished -= 1
                self._pass_on()

        threads = [threading.Thread(target=turn, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._over.wait()
        if self._failure is not None:
            raise self._failure
        left = [key for key, posts in self.posts.items() if posts]
        assert not left and not self.meetings, f"messages without a partner: {left or list(self.meetings)}"
        return results

    def wait(self, rank: int, text: Callable[[], str]) -> None:
        """Let others run until one of them calls `wake` for this rank.

        text: returns the message of the wait, for a deadlock.
        """
        self._waiting[rank] = text
        self._pass_on()
        self._batons[rank].acquire()
        if self._failure is not None:
            raise _Stopped

    def wake(self, rank: int) -> None:
        """Let a rank go on that waits."""
        if self._waiting.pop(rank, None) is not None:
            self._ready.append(rank)

    def _pass_on(self) -> None:
        if not self._ready and self._waiting:
            texts = Counter(text() for text in self._waiting.values()).most_common(20)
            waits = "; ".join(f"{number} ranks in {text}" for text, number in texts)
            self._fail(WrongMessages(f"deadlock: {waits}"))
        if self._ready:
            self._batons[self._ready.popleft()].release()
        elif not self._unfinished:
            self._over.set()

    def _fail(self, error: BaseException) -> None:
        """End all other ranks, in turns."""
        self._failure = self._failure or error
        for rank in list(self._waiting):
            self.wake(rank)


_THIS: Any = threading.local()
"""This thread's `turns`."""


class _Meeting:
    """Collective that ranks wait in.

    what: operation and sizes, which all of them must give.
    """

    def __init__(self, what: tuple[Any, ...], caller: int) -> None:
        self.what, self.caller = what, caller
        self.given: dict[int, Given] = {}
        self.results: list[Given] = []


class _Post:
    """Send or receive that may wait for its partner.

    what: data type, elements, tag, and whether it is in a batch; its partner's must be equal.
    """

    def __init__(self, rank: int, tensor: Tensor, what: tuple[Any, ...]) -> None:
        self.rank, self.tensor, self.what, self.met = rank, tensor, what, False
        self.sent = tensor


class TurnsGroup(dist.ProcessGroup):
    """Process group of ranks that take turns.

    ranks: its ranks in the world.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name, self._rank, self._size = name, rank, size
        self._ranks = tuple(ranks) or tuple(range(size))
        self._turns: Turns = _THIS.turns
        self._calls = 0
        self._batch: list[_Post] | None = None

    # What torch asks of a process group in Python.

    def getBackendName(self) -> str:
        return "turns"

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # Collectives

    def _meet(
        self, what: tuple[Any, ...], given: Given, taken: Given, combine: Callable[[list[Given]], list[Given]]
    ) -> dist.Work:
        """Wait until all ranks of the group give their tensors, and return the work that writes those they take.

        combine: function from what every rank gives to what every rank takes.
        """
        turns, me, self._calls = self._turns, self._ranks[self._rank], self._calls + 1
        key = self._name, self._ranks, self._calls
        meeting = turns.meetings.get(key)
        if meeting is None:
            meeting = turns.meetings[key] = _Meeting(what, me)
        if meeting.what != what:
            raise WrongMessages(f"rank {me} calls {what}, but rank {meeting.caller} calls {meeting.what} in {key}")
        meeting.given[self._rank] = given
        if len(meeting.given) < self._size:
            turns.wait(me, lambda: f"{what} of ranks {self._ranks}, call {key[-1]}")
        else:
            del turns.meetings[key]
            with torch.no_grad():
                meeting.results = combine([meeting.given[rank] for rank in range(self._size)])
            for rank in self._ranks:
                turns.wake(rank)
        return _writing(taken, lambda: meeting.results[self._rank])

    def allreduce(self, tensors: Given, opts: Any = None) -> dist.Work:
        operation = _name(opts.reduceOp)

        def combine(given: list[Given]) -> list[Given]:
            sums = [REDUCTIONS[operation](torch.stack(same), dim=0) for same in zip(*given, strict=True)]
            return [sums] * self._size

        return self._meet(("all_reduce", operation, _sizes(tensors)), tensors, tensors, combine)

    def all_gather_single_coalesced(self, outputs: Given, inputs: Given, opts: Any = None) -> dist.Work:
        def combine(given: list[Given]) -> list[Given]:
            return [[torch.stack(same) for same in zip(*given, strict=True)]] * self._size

        return self._meet(("all_gather", _sizes(inputs)), inputs, outputs, combine)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Given, inputs: Given, opts: Any = None) -> dist.Work:
        operation = _name(opts.reduceOp)

        def combine(given: list[Given]) -> list[Given]:
            sums = [REDUCTIONS[operation](torch.stack(same), dim=0) for same in zip(*given, strict=True)]
            return [list(parts) for parts in zip(*(one.flatten().chunk(self._size) for one in sums), strict=True)]

        return self._meet(("reduce_scatter", operation, _sizes(inputs)), inputs, outputs, combine)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, taken_sizes: Any, given_sizes: Any, opts: Any = None
    ) -> dist.Work:
        sizes = torch.tensor([list(given_sizes), list(taken_sizes)])

        def combine(every: list[Given]) -> list[Given]:
            sent = [tensor.split(sizes[0].tolist()) for tensor, sizes in every]
            for taker, (_, sizes) in enumerate(every):
                lengths = [len(pieces[taker]) for pieces in sent]
                if lengths != sizes[1].tolist():
                    raise WrongMessages(f"rank {taker} of {self._ranks} takes {sizes[1]}, but is sent {lengths}")
            return [[torch.cat([pieces[taker] for pieces in sent])] for taker in range(self._size)]

        # Ranks send different amounts, which `combine` compares.
        return self._meet(("all_to_all", given.dtype), [given, sizes], [output], combine)

    def broadcast(self, tensors: Given, opts: Any = None) -> dist.Work:
        def combine(given: list[Given]) -> list[Given]:
            return [[tensor.clone() for tensor in given[opts.rootRank]]] * self._size

        return self._meet(("broadcast", opts.rootRank, _sizes(tensors)), tensors, tensors, combine)

    # Messages between two ranks

    def send(self, tensors: Given, peer: int, tag: int) -> dist.Work:
        return self._post("send", tensors[0], self._rank, peer, tag)

    def recv(self, tensors: Given, peer: int, tag: int) -> dist.Work:
        return self._post("receive", tensors[0], peer, self._rank, tag)

    def _post(self, kind: str, tensor: Tensor, source: int, target: int, tag: int) -> dist.Work:
        turns, me = self._turns, self._ranks[self._rank]
        post = _Post(me, tensor, (tensor.dtype, tensor.numel(), tag, "batch" if self._batch is not None else "single"))
        route = self._name, self._ranks[source], self._ranks[target]
        partners = turns.posts["receive" if kind == "send" else "send", route]
        if partners:
            partner = partners.popleft()
            if partner.what != post.what:
                raise WrongMessages(f"rank {me} posts {kind} {post.what}, rank {partner.rank} {partner.what}, {route}")
            sender, receiver = (post, partner) if kind == "send" else (partner, post)
            receiver.sent = sender.tensor.detach().clone()
            post.met = partner.met = True
            turns.wake(partner.rank)
        else:
            turns.posts[kind, route].append(post)
        if self._batch is not None:
            self._batch.append(post)
        else:
            self._until_met([post], lambda: f"{kind} from {route[1]} to {route[2]} {post.what}")
        return _writing([tensor] if kind == "receive" else [], lambda: [post.sent])

    def start_batch(self) -> None:
        """Let the next messages start together."""
        self._batch = []

    def end_batch(self) -> None:
        """Wait for all messages since `start_batch`."""
        posts, self._batch = self._batch or [], None
        self._until_met(posts, lambda: f"a batch of rank {self._ranks[self._rank]}")

    def _until_met(self, posts: list[_Post], text: Callable[[], str]) -> None:
        while not all(post.met for post in posts):
            self._turns.wait(self._ranks[self._rank], text)


def _sizes(tensors: Given) -> list[tuple[torch.dtype, int]]:
    return [(tensor.dtype, tensor.numel()) for tensor in tensors]


def _name(operation: Any) -> str:
    return str(getattr(operation, "op", operation)).rpartition(".")[2]


def _writing(taken: Given, results: Callable[[], Given]) -> dist.Work:
    """Return the work that writes results when it is waited for."""

    def write(timeout: Any) -> bool:
        with torch.no_grad():
            for tensor, result in zip(taken, results(), strict=bool(taken)):
                tensor.detach().copy_(result.view_as(tensor))
        return True

    return PythonCallbackWork(write)


def _batch(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start messages together, in place of ``torch.distributed.batch_isend_irecv``."""
    group = operations[0].group or dist.group.WORLD
    group.start_batch()
    works = []
    for one in operations:
        peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
        works.append(one.op(one.tensor, group=one.group, tag=one.tag, **peer))
    group.end_batch()
    return works


def _made(options: Any, _: Any) -> TurnsGroup:
    ranks = options.global_ranks_in_group
    return TurnsGroup(options.group_id, ranks, options.group_rank, options.group_size)


dist.Backend.register_backend("turns", _made, extended_api=True, devices=["cpu"])
