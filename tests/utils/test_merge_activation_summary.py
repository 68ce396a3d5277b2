"""Two runs' statistics in one file per step."""

import torch

from onnxtrain.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber
from onnxtrain.utils.hooks.merge_activation_summary import main


def run(folder, module, steps):
    GlobalSubscriberManager.subscribe(module, [StatisticsSubscriber(folder)])
    for _ in range(steps):
        module(torch.ones(2, 3)).sum().backward()
    GlobalSubscriberManager.unsubscribe()


def test_both_runs_by_step(tmp_path, capsys):
    run(tmp_path / "eager", torch.nn.Linear(3, 5), 2)
    run(tmp_path / "ours", torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU()), 1)
    output = ["--output_dir", str(tmp_path / "out")]
    assert not main(["--pt_dir", str(tmp_path / "eager"), "--ort_dir", str(tmp_path / "ours"), *output])
    assert capsys.readouterr().out == f"2 steps: {tmp_path / 'out' / 'merge_summary'}\n"
    first, second = (text.read_text() for text in sorted((tmp_path / "out/merge_summary").iterdir()))
    assert first.startswith("1. ") and "[eager]\nshape: (2, 5)" in first and "[ours]\nshape: (2, 5)" in first
    assert "[eager]\nnot there\n[ours]\nshape: (2, 5)" in first
    assert "[ours]\nnot there\n" in second and "[ours]\nshape" not in second


def test_a_folder_that_is_not_there(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    given = ["--pt_dir", str(tmp_path / "a"), "--ort_dir", str(tmp_path / "b"), "--output_dir", str(tmp_path / "out")]
    assert main(given) == 1 and "there is no folder" in capsys.readouterr().err
    (tmp_path / "b").mkdir()
    assert main(given) == 1 and "has a step" in capsys.readouterr().err and not (tmp_path / "out").exists()
