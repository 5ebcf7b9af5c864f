"""Who looks on at calls: `watch` and `record` stand here while entered; without them a call costs nothing more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from onchip import autograd
from onchip.autograd import Call


class Observer(Protocol):
    def called(self, call: Call, out: Tensor, lse: Tensor, seconds: float) -> None:
        """After a call that returned; seconds of host time, which on a GPU is not the kernel's."""
        ...


_observers: tuple[Observer, ...] = ()
_lock = threading.Lock()
_plain = autograd.apply


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let the observer see every call of this process until the block ends."""
    global _observers
    with _lock:
        _observers = (*_observers, observer)
        autograd.apply = _observed
    try:
        yield
    finally:
        with _lock:
            _observers = tuple(other for other in _observers if other is not observer)
            if not _observers:
                autograd.apply = _plain


def _observed(call: Call) -> tuple[Tensor, Tensor]:
    start = time.perf_counter()
    out, lse = _plain(call)
    seconds = time.perf_counter() - start
    if not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        for observer in _observers:
            observer.called(call, out, lse, seconds)
    return out, lse
