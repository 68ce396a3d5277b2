"""What a run says, and its end by Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from onnxtrain.finetune.model import GB
from onnxtrain.utils.torch_profile_utils import memory_of_the_process


def progress(tokens: Sequence[int]) -> Any:
    """Prints a line for each update; Ctrl-C saves a checkpoint and ends the run."""
    import transformers

    mean = sum(tokens) / len(tokens)

    class Progress(transformers.TrainerCallback):  # type: ignore[misc]
        interrupted = False
        times: list[float]  # of the begin of the first update, and the ends of all

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.times = [time.monotonic()]
            self.before = signal.signal(signal.SIGINT, self.interrupt)

        def interrupt(self, *_: object) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            print("Ctrl-C: this step ends, and a checkpoint is saved; once more ends at once", flush=True)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if self.interrupted:
                control.should_save = control.should_training_stop = True
            return control

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None,
                   **_: Any) -> None:
            if not logs or "loss" not in logs:
                return
            self.times.append(time.monotonic())
            later = self.times[len(self.times) > 2:]  # the first update captures, exports and builds
            seconds = (later[-1] - later[0]) / (len(later) - 1)
            rate = args.gradient_accumulation_steps * args.per_device_train_batch_size * mean / seconds
            left = (state.max_steps - state.global_step) * seconds
            print(f"update {state.global_step} of {state.max_steps}: loss {float(logs['loss']):.4f}, {rate:.0f} "
                  f"tokens/s, {clock(left)} left, {memory_of_the_process()['max resident'] / GB:.1f} GB", flush=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            signal.signal(signal.SIGINT, self.before)

    return Progress()


def clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
