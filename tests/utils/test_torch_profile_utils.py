"""Lines of memory around the phases of a step."""

import logging
import mmap
import re

import torch

from onnxtrain.utils.torch_profile_utils import log_memory_usage, torch_nvtx_range_pop, torch_nvtx_range_push


def test_the_line_has_the_modules_sizes(capsys):
    module = torch.nn.Linear(1024, 1024)
    module.register_buffer("table", torch.zeros(2 << 18))
    module.weight.grad = torch.zeros_like(module.weight)
    torch_nvtx_range_push("phase")
    log_memory_usage("forward", step_info="step 1", module=module)
    torch_nvtx_range_pop()
    line = capsys.readouterr().out
    assert re.match(r"step 1 memory \(MiB\) \| phase: forward \| ", line)
    assert line.endswith("parameters: 4 | gradients: 4 | buffers: 2\n")


def test_a_logger_gets_it_and_a_block_shows(caplog):
    log = logging.getLogger("memory")
    block = mmap.mmap(-1, 64 << 20)  # goes back to the system at once, which malloc's memory may not
    block.write(bytes(64 << 20))
    with caplog.at_level(logging.INFO, "memory"):
        log_memory_usage("with", logger=log)
        block.close()
        log_memory_usage("without", logger=log)
    if not torch.cuda.is_available():
        sizes = [int(re.search(r"\| resident: (\d+)", message)[1]) for message in caplog.messages]
        assert sizes[0] - sizes[1] >= 32
