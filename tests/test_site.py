"""The documentation as a whole, without mkdocs: the navigation has every page, links and anchors lead somewhere, pages
stay short, and what they say of the code is in the code. tests/docs.sh builds the site itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from onnxtrain._migrate import report as migration

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
ON_GITHUB_ONLY = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "csrc/README.md", "csrc/threads.md",
                  "cuda/README.md",
                  "examples/bert_pretraining/README.md", "third_party/README.md"]
GENERATED = {"environment.md", "models.md", "operators.md", "api.md", "api/optim.md", "api/training.md", "api/utils.md"}
LIMITS = {"performance/": 200, "internals/decisions/": 250, "": 300}  # lines, by the beginning of a page's path
FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
         "ORTMODULE_CACHE_DIR": "", "OMP_NUM_THREADS": "1"}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchor(heading: str) -> str:
    """As GitHub makes it, and as mkdocs.yml has mkdocs make it."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")


def anchors(text: str) -> list[str]:
    return [anchor(heading) for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)]


def broken_links(page: Path, within: Path) -> list[str]:
    """Relative links of a page that lead to no file within a folder, or to no anchor of a page, or to two."""
    found = []
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", read(page)))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or within not in file.parents:
            found.append(f"{page.name}: {link} leads to no file of {within.name}/")
        elif fragment and anchors(read(file)).count(fragment) != 1:
            found.append(f"{page.name}: {link} leads to no anchor, or to two")
    return found


def test_the_navigation_has_every_page_once():
    nav = read(ROOT / "mkdocs.yml").partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w/]+\.md", nav)) == PAGES


def test_every_link_leads_somewhere():
    """Those of pages within docs/, since the site has nothing else."""
    found = [fault for page in PAGES for fault in broken_links(DOCS / page, DOCS)]
    found += [fault for page in ON_GITHUB_ONLY for fault in broken_links(ROOT / page, ROOT)]
    assert not found, "\n".join(found)


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "b.md").write_text("# B\n\n## One thing, two\n\n## Twice\n\n## Twice\n\n```sh\n# no heading\n```\n")
    page = tmp_path / "a.md"
    page.write_text("[1](b.md) [2](b.md#one-thing-two) `[3](no.md)` [4](https://example.org) [5](#a)\n\n# A\n")
    assert not broken_links(page, tmp_path)
    for link in ("no.md", "b.md#one-thing", "b.md#no-heading", "b.md#twice", "#b", "../outside.md"):
        page.write_text(f"[text]({link})\n")
        assert broken_links(page, tmp_path), link


def limit(page: str) -> int:
    return 700 if page in GENERATED else next(lines for start, lines in LIMITS.items() if page.startswith(start))


def test_pages_are_short():
    assert not {page for page in PAGES if len(read(DOCS / page).splitlines()) > limit(page)}
    assert len(read(ROOT / "README.md").splitlines()) < 130


def test_decisions_have_one_form_and_the_index_lists_them():
    parts = ["Context", "Decision", "Evidence", "Rejected", "Revisit when"]
    listed = []
    for path in (DOCS / "internals/decisions").glob("*.md"):
        for title, text in re.findall(r"^## (.*)\n((?:(?!^## ).*\n?)*)", read(path), re.M):
            found = [each.rstrip(".") for each in re.findall(r"^\*\*(.*?)\*\*", text, re.M)]
            assert found[:2] == parts[:2] and found == [each for each in parts if each in found], (title, found)
            listed.append(f"- [{title}](decisions/{path.name}#{anchor(title)})")
    assert sorted(listed) == sorted(re.findall(r"^- .*$", read(DOCS / "internals/decisions.md"), re.M))


def test_the_life_of_a_step_names_functions_that_exist():
    rows = re.findall(r"^\| \d+ \| .* \| `([\w./]+)` \| (.*) \|$", read(DOCS / "internals/step.md"), re.M)
    assert len(rows) > 25
    for path, names in rows:
        source = read(ROOT / path)
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", source), (path, name)


def test_the_drawing_names_files_that_exist():
    for path in re.findall(r"(?:csrc|onnxtrain)/[\w./]+", read(DOCS / "internals/architecture.svg")):
        assert (ROOT / path).exists(), path


def test_api_pages_are_current():
    done = subprocess.run([sys.executable, ROOT / "tools/api.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(DOCS / page), re.M | re.S)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, cwd=folder,
                          env=PATHS)


def test_the_script_of_the_migration(tmp_path, monkeypatch):
    """The report of its page is what the command prints; after the one change the script runs under both names."""
    monkeypatch.chdir(tmp_path)
    file = Path("train.py")
    (script,), (report,), (change,) = (blocks("migration.md", each) for each in ("python", "text", "diff"))
    old, new = (re.search(rf"^\{sign}(.*)$", change, re.M)[1] for sign in "-+")
    file.write_text(script)
    assert script.count(old) == 1 and migration(file) == (report.rstrip(), False)
    file.write_text(script.replace(old, new))
    assert migration(file)[1]
    done = run(tmp_path, "-m", "onnxtrain", "run", "train.py")
    assert done.stdout.startswith("loss 0."), done.stderr
    (tmp_path / "new.py").write_text(script.replace(old, new).replace("onnxruntime.training", "onnxtrain"))
    assert run(tmp_path, "new.py").stdout == done.stdout


def test_the_script_for_several_processes(tmp_path):
    (script,) = blocks("distributed.md", "python")
    (tmp_path / "train.py").write_text(script)
    done = run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "2 processes, 20 steps in the engine\n"


def faults(site: Path) -> list[str]:
    """What tools/check_site.py finds in a site."""
    done = subprocess.run([sys.executable, ROOT / "tools/check_site.py", site], capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.splitlines() if done.returncode else []


def test_the_check_of_a_built_site(tmp_path):
    """tools/check_site.py, on a site of two pages."""
    page = '<html><body><h1 id="top">A</h1><a href="{}">link</a><img src="{}"></body></html>'
    (tmp_path / "b.html").write_text('<html><body><h1 id="top">B</h1></body></html>')
    (tmp_path / "image.svg").write_text("<svg/>")
    for link, image, good in (("b.html#top", "image.svg", True), ("#top", "image.svg", True),
                              ("https://example.org", "image.svg", True), ("c.html", "image.svg", False),
                              ("b.html#none", "image.svg", False), ("b.html", "https://example.org/image.svg", False),
                              ("b.html", "none.svg", False)):
        (tmp_path / "a.html").write_text(page.format(link, image))
        assert (not faults(tmp_path)) is good, (link, image, faults(tmp_path))
    (tmp_path / "a.html").write_text(page.format("b.html", "image.svg"))
    assert not faults(tmp_path)
    (tmp_path / "c.html").write_text('<pre class="mermaid">graph</pre>')
    assert ["mermaid" in fault for fault in faults(tmp_path)] == [True]
    (tmp_path / "c.html").unlink()
    (tmp_path / "a.css").write_text("@import url(https://fonts.example.org/a.css);")
    assert ["fonts.example.org" in fault for fault in faults(tmp_path)] == [True]
