"""The pages: every link leads somewhere, the configuration is the schema's, README stays short."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from runner.command import COMMANDS
from runner.config.compose import fields
from runner.config.foreign_keys import answers
from runner.config.schema import RunConfig
from scripts import docs
from scripts.soak_picture import told

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY"))]
PAGES += sorted(FOLDER.glob("**/*.md"))
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`+[^`]+`+")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
_OUTSIDE = re.compile(r"[a-z][a-z+.-]*:|//")


def links(text: str) -> list[str]:
    """Targets of the Markdown links that a reader can follow; code is left out."""
    bare = _CODE.sub("", _FENCE.sub("", text))
    return [*_LINK.findall(bare), *_REFERENCE.findall(bare)]


def anchors(text: str) -> set[str]:
    """The anchors of a page that GitHub and the built pages both have."""
    titles = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        for title in _HEADING.findall(_FENCE.sub("", text))
    ]
    return {_on_github(title) for title in titles} & {_in_pages(title) for title in titles}


def _on_github(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _in_pages(title: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def broken(page: Path, text: str) -> Iterator[str]:
    """The links of a page that lead nowhere, or out of the built pages."""
    for target in links(text):
        if _OUTSIDE.match(target):
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / unquote(name)).resolve() if name else page
        if not to.is_relative_to(ROOT) or not to.exists():
            yield f"{target}: no such file"
        elif page.is_relative_to(FOLDER) and not to.is_relative_to(FOLDER):
            yield f"{target}: outside docs/, where the built pages cannot lead"
        elif anchor and anchor not in anchors(text if to == page else to.read_text()):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page, page.read_text())) == []


@pytest.mark.parametrize("name", docs.PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text() == docs.PAGES[name](), (
        "out of date: run python scripts/docs.py"
    )


def test_the_page_about_pictures_shows_the_example() -> None:
    code = (ROOT / "examples" / "vision.py").read_text().partition("import sys")[2]
    assert code in (FOLDER / "vision.md").read_text()


def test_every_page_is_in_the_navigation_and_in_the_overview() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    overview = (FOLDER / "index.md").read_text()
    for page in FOLDER.glob("*.md"):
        assert f": {page.name}\n" in navigation
        assert page.name == "index.md" or f"({page.name})" in overview


def test_the_first_page_stays_short_and_says_what_ran_on_gpus() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1500
    assert "run on GPUs" in text.partition("## What it does not do\n\n")[2].splitlines()[0]


def test_the_version_is_the_same_everywhere() -> None:
    from runner.system.version import __version__

    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"The version is {__version__}." in (FOLDER / "stability.md").read_text()


def test_every_command_is_told_in_the_pages() -> None:
    told = "\n".join(page.read_text() for page in PAGES if page.name != "CHANGELOG.md")
    for command in COMMANDS:
        assert re.search(rf"\b(runner|holdfast) {command}\b", told) or f"`{command}`" in told


# Named in examples: arguments of a user's code, attributes of the guard, options of other tools.
_OF_OTHERS = {
    "data.root", "model.hidden", "model.width", "optim.alpha", "track.url",
    "guard.ok", "guard.updates", "guard.over", "guard.note", "guard.skipped", "guard.close",
    "batch.safetensors", "--safe", "--shm-size", "--arg", "--dependency",
    "docs/records/NAME.json", "scripts/bench/results/cpu.json",
}  # fmt: skip
_KEY = re.compile(r"(?<![\w./-])[a-z_]+\.[a-z_]+\b(?![(/])")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_FILE = re.compile(
    r"(?<![\w/.-])(?:tests|scripts|runner|examples|launch|configs)/[\w./-]+(?![\w{*])"
)


def unknown_names(text: str, keys: set[str], sources: str) -> Iterator[str]:
    """Keys, options and files in the code of a page that do not exist."""
    groups = {name.partition(".")[0] for name in keys if "." in name}
    for code in (*(m.group() for m in _FENCE.finditer(text)), *_CODE.findall(text)):
        for name in {*_KEY.findall(code)} - keys:
            if name.partition(".")[0] in groups and not name.endswith((".yaml", ".jsonl")):
                yield name
        yield from (flag for flag in _FLAG.findall(code) if flag not in sources)
        yield from (file for file in _FILE.findall(code) if not (ROOT / file.rstrip(".")).exists())


def test_keys_options_and_files_in_the_pages_exist() -> None:
    keys = {name for name, _, _ in fields(RunConfig())}
    rooms = (ROOT / name for name in ("runner", "scripts", "examples", "launch", "tests"))
    files = (path for room in rooms for path in room.rglob("*") if path.suffix in (".py", ".sh"))
    sources = "\n".join(path.read_text() for path in files)
    unknown = {
        f"{page.name}: {name}"
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for name in unknown_names(page.read_text(), keys, sources)
        if name not in _OF_OTHERS | answers().keys()
    }
    assert unknown == set()


def test_both_glossaries_say_the_same() -> None:
    ours = (ROOT / "CONTRIBUTING.md").read_text().partition("## Glossary")[2].partition("\n## ")[0]
    rows = [line for line in ours.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    pages = (FOLDER / "glossary.md").read_text().splitlines()
    assert [row for row in rows if row not in pages] == []


def test_nothing_names_this_machine() -> None:
    for page in PAGES:
        assert not re.search(r"/work/|/root/|/home/|/tmp/", page.read_text()), page


def test_the_picture_says_what_its_record_says() -> None:
    record = json.loads((FOLDER / "survived.json").read_text())
    healed, told, unguarded = (record[name] for name in ("healed", "told", "unguarded"))
    assert healed["digest"] == told["digest"] != unguarded["digest"]
    first, last = record["poisoned"]
    lost = next(step for step, loss, _ in unguarded["steps"] if loss is None)
    bad = [action for _, _, action in healed["steps"] if action != "apply"]
    assert (bad, healed["rollbacks"]) == (["redo"] * 4, [])
    assert healed["skipped"] == [[first, last + 1]], "the culprits and no other"
    readme = (ROOT / "README.md").read_text()
    for words in (f"{last - first + 1} samples gave NaN", f"NaN from step {lost} on"):
        assert words in readme


def test_what_the_soaks_say_is_what_their_records_say() -> None:
    picture, page = (FOLDER / "soak.svg").read_text(), (FOLDER / "survives.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for name, what in (("soak", "random faults"), ("soak-trace", "recorded failures")):
        record = json.loads((FOLDER / "records" / f"{name}.json").read_text())
        for line in told(record["totals"]):
            assert html.escape(line, quote=False) in picture, "run python -m scripts.soak_picture"
        faults, same = (record["totals"][key] for key in ("faults", "same_digest"))
        assert f"{faults} {what}" in readme
        [row] = [line for line in page.splitlines() if f"(records/{name}.json)" in line]
        assert f"| {faults}" in row and f"{same} of " in row
