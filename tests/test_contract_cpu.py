"""The contract on the tiled CPU backend, in its own tiles and in small ones, and on the reference."""

from contract import Contract, Target


class TestCpu(Contract):
    target = Target("cpu", dtypes=("float32", "bfloat16"))


class TestCpuInSmallTiles(Contract):
    target = Target("cpu", tile=(16, 32), forced=True)


class TestReference(Contract):
    target = Target("reference", dtypes=("float32", "float64"))
