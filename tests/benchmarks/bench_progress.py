"""The share of a training's time that its progress takes in a kernel: `python -m tests.benchmarks.bench_progress`.

The target is 1 % of the processor time of the training's thread, for small steps, where it weighs most.
"""

from __future__ import annotations

from contextlib import closing

from tests.magics.test_kernel import EIGHT_SECONDS, SMALL_STEPS, Kernel

TARGET = 0.01
CLOCKED = """
import time
from tfnb.fitting.fit_loop import _Run
looked, spent = _Run._look, []
def clocked(run, seconds):
    began = time.thread_time()
    looked(run, seconds)
    spent.append(time.thread_time() - began)
_Run._look = clocked
"""


def main() -> None:
    """Train for eight seconds, and print how often progress was shown, and its share."""
    with closing(Kernel()) as kernel:
        kernel.run("%load_ext tfnb\nimport torch, tfnb\nfrom torch import nn")
        kernel.run(SMALL_STEPS)
        kernel.run(CLOCKED + EIGHT_SECONDS)
        shown, share = eval(kernel.text("(len(spent), sum(spent) / result.seconds)"))
    print(f"shown {shown} times; {share:.2%} of the time, target {TARGET:.0%}")


if __name__ == "__main__":
    main()
