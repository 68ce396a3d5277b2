"""Files of the cache are whole and this user's own, and folders of others are not used."""

import logging
import os
import subprocess
import sys
import textwrap

from test_cache import ROOT, Net, counts, folder  # noqa: F401


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        assert counts(Net()) == (1, 0)
    assert "cannot keep an export in" in caplog.text


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path / "made"))
    assert counts(Net()) == (1, 0)
    assert (tmp_path / "made").stat().st_mode & 0o077 == 0
    (path,) = (tmp_path / "made").glob("*.zip")
    path.chmod(0o666)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        assert counts(Net()) == (1, 0)
        assert "others may write to it (mode 666)" in caplog.text
        (tmp_path / "made").chmod(0o770)
        for _ in range(2):
            assert counts(Net()) == (1, 0)
    assert caplog.text.count(": others may write to it (mode 770)") == 1


def test_nothing_is_warned_of_the_default_folder(tmp_path, monkeypatch, caplog):
    """Nobody asked for it: a home that cannot be written, or that others may write to, is no fault of the script."""
    monkeypatch.delenv("ORTMODULE_CACHE_DIR")
    (tmp_path / "onnxtrain").mkdir(mode=0o700)
    (tmp_path / "onnxtrain").chmod(0o770)
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO, "onnxtrain"):
        for base in (tmp_path, tmp_path / "file"):
            monkeypatch.setenv("XDG_CACHE_HOME", str(base))
            assert counts(Net()) == (1, 0)
    said = [record for record in caplog.records if str(tmp_path) in record.getMessage()]
    assert len(said) >= 2 and all(record.levelno == logging.INFO for record in said)


def test_a_folder_of_another_user_is_not_used(folder, monkeypatch, caplog):
    assert counts(Net()) == (1, 0)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        assert counts(Net()) == (1, 0)
    assert "does not use ORTMODULE_CACHE_DIR=" in caplog.text and ": it belongs to user" in caplog.text


def test_processes_side_by_side_evict_and_read(folder):
    script = """
        import pathlib, sys
        from onnxtrain._export import files
        folder = pathlib.Path(sys.argv[1])
        for step in range(200):
            with files.replacing(folder / f"x-{sys.argv[2]}-{step}.zip") as file:
                file.write(b"whole")
            files.evict(folder, "x-*.zip", count=4)
            for path in files.newest(folder, "x-*.zip"):
                try:
                    assert files.content(path, 100) == b"whole"
                except FileNotFoundError:
                    pass
        """
    command = [sys.executable, "-c", textwrap.dedent(script), str(folder)]
    running = [subprocess.Popen([*command, number], env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
               for number in "01"]
    assert [(process.communicate()[1], process.returncode) for process in running] == [(b"", 0)] * 2
    assert 1 <= len(list(folder.iterdir())) <= 5
