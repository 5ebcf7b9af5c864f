"""Hopper launches of so few programs that each takes several tiles in turn, as in long problems."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_programs(count: int = 3) -> Iterator[None]:
    from onchip.backends.compiled.launch import forget
    from onchip.backends.hopper import launch

    usual, launch.multiprocessors = launch.multiprocessors, lambda index: count
    launch.plan.cache_clear()
    forget()
    try:
        yield
    finally:
        launch.multiprocessors = usual
        launch.plan.cache_clear()
        forget()
