"""What the workers of an endpoint share: the number of requests in progress, and the conversations that were sampled lately."""

from __future__ import annotations

from mmap import mmap

from lightning_core.chat.history.conversations import SampledConversations

_COUNT_SIZE = 8


class ShardMemory:
    """Memory of all workers. Each writes its own number of requests."""

    def __init__(self, fd: int, workers: int) -> None:
        """``fd``: a file of `size` bytes, at first zeros."""
        memory = memoryview(mmap(fd, self.size(workers)))
        self.conversations = SampledConversations(memory[: SampledConversations.SIZE])
        self._requests = memory[SampledConversations.SIZE :].cast("Q")
        self._place = 0

    @staticmethod
    def size(workers: int) -> int:
        """The bytes that ``workers`` workers need."""
        return SampledConversations.SIZE + _COUNT_SIZE * workers

    def take(self, place: int) -> None:
        """Be the worker with the number ``place``."""
        self._place = place

    def clear(self, place: int) -> None:
        """Forget the requests of the worker with the number ``place``, which has ended."""
        self._requests[place] = 0

    def count(self, requests: int) -> None:
        """Note that this worker has so many requests in progress."""
        self._requests[self._place] = requests

    @property
    def requests(self) -> int:
        """The requests in progress of all workers."""
        return sum(self._requests)
