"""Prompt sets in the forms in which they are published, and the files that a run reads."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from solrl_ray.cli import main
from solrl_ray.errors import UserError
from solrl_ray.prompts.imports import import_prompts, write_prompts
from solrl_ray.prompts.prompt_set import prompt_id, read_prompts
from tests.support.editing import picture

DRAWBENCH = (
    'Prompts,Category\nA red colored car.,Colors\n"A ""sign"", that says\nhello",Text\nA red colored car.,Colors\n'
)


def test_the_published_pickscore_split_is_a_folder_of_two_text_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "pickscore", tmp_path / "out"
    source.mkdir()
    (source / "train.txt").write_text(" a cat\na dog\n\na cat \nA cat\na horse\n")
    (source / "test.txt").write_text("a horse\na cow\n")
    assert main(["prompts", "import", str(source), "--out", str(out)]) == 0
    assert [p.text for p in read_prompts(str(out / "train.jsonl"))] == ["a cat", "a dog", "A cat"]
    assert [p.text for p in read_prompts(str(out / "heldout.jsonl"))] == ["a horse", "a cow"]
    first = json.loads((out / "train.jsonl").read_text().splitlines()[0])
    assert first == {"id": prompt_id("a cat"), "text": "a cat"}
    assert capsys.readouterr().out.splitlines() == [
        "read        5 to train on, 2 held out",
        "dropped     1 repetition, 1 training prompt held out as well, 1 line without a prompt",
        "kept        3 to train on, 2 held out",
        f"prompts.train: {out / 'train.jsonl'}",
        f"prompts.heldout: {out / 'heldout.jsonl'}",
    ]


def test_drawbench_is_a_table_that_is_held_out_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "drawbench.csv").write_text(DRAWBENCH)
    imported = import_prompts(str(tmp_path / "drawbench.csv"), heldout="all")
    assert imported.train == ()
    assert imported.heldout == ("A red colored car.", 'A "sign", that says\nhello')
    assert (imported.lines, imported.repeated) == ((0, 3), 1)
    (file,) = write_prompts(imported, tmp_path / "out")
    assert [p.text for p in read_prompts(str(file))] == list(imported.heldout)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", "a cat\r\na dog\r\n"),
        ("p.TSV", "Prompt\tCategory\na cat\tx\na dog\ty\n"),
        ("p.csv", "\ufeffid,caption\n1,a cat\n2,a dog\n"),
        ("p.JSONL", '{"prompt": " a cat"}\n\n{"prompt": "a dog", "n": 1}\n'),
        ("p.json", '["a cat", " a dog"]'),
        ("p.json", '[{"text": "a cat"}, {"text": "a dog", "n": 1}]'),
    ],
)
def test_every_form_gives_the_same_prompts(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert import_prompts(str(tmp_path / name)).train == ("a cat", "a dog")


@pytest.mark.parametrize(
    ("content", "expected"),
    [  # as a spreadsheet and as pandas write them
        ('id\ttext\n1\ta sign "open", lit\n2\t"a" dog\n', ('a sign "open", lit', '"a" dog')),
        ('id\ttext\n1\t"a sign ""open"", lit"\n2\t"""a"" dog"\n', ('a sign "open", lit', '"a" dog')),
        ('text\n"a cat\na dog"\n', ('"a cat', 'a dog"')),
    ],
)
def test_quotes_of_a_tab_separated_file_are_text_unless_all_of_them_quote_fields(
    content: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "p.tsv").write_text(content)
    assert import_prompts(str(tmp_path / "p.tsv")).train == expected


@pytest.mark.parametrize("source", ["prompts/captions.csv", "there/captoins", "~nobody-of-that-name/p.txt", "a/"])
def test_a_mistyped_path_is_not_asked_for_at_the_hub(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"^There is no |knows no home ~nobody-of-that-name"):
        import_prompts(source)


class Hub:
    """The package 'datasets', as far as it is called."""

    def __init__(self, **splits: list[dict[str, object]]) -> None:
        self.splits = splits

    def load_dataset(self, name: str, **options: str) -> dict[str, list[dict[str, object]]]:
        if name != "owner/na.me":
            raise ConnectionError(f"no {name}")
        return self.splits


def test_a_data_set_is_read_by_its_splits_and_its_errors_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub(train=[{"text": "a cat"}, {"text": None}], test=[{"text": "b"}]))
    imported = import_prompts("hf://datasets/owner/na.me")
    assert (imported.train, imported.heldout, imported.empty) == (("a cat",), ("b",), 1)
    with pytest.raises(UserError, match=r"^owner/other cannot be loaded: ConnectionError: no owner/other$"):
        import_prompts("owner/other")
    monkeypatch.setitem(sys.modules, "datasets", Hub(train=[{"text": "a cat"}, {"text": 7}]))
    with pytest.raises(UserError, match=r"^hf://datasets/owner/na.me, train, row 2, column 'text' has 7; it must"):
        import_prompts("hf://datasets/owner/na.me")


def test_which_prompts_are_split_off_does_not_depend_on_their_order(tmp_path: Path) -> None:
    texts = [f"prompt {i}" for i in range(200)]
    for name, order in (("a", texts), ("b", texts[::-1]), ("c", [*texts, "one more"])):
        (tmp_path / f"{name}.txt").write_text("\n".join(order))
    first, reverse, more = (import_prompts(str(tmp_path / f"{name}.txt"), heldout=50) for name in "abc")
    assert len(first.heldout) == 50
    assert not set(first.heldout) & set(first.train)
    assert set(first.heldout) == set(reverse.heldout)
    assert len(set(first.heldout) & set(more.heldout)) >= 49
    assert first.heldout != tuple(texts[:50])


def test_a_file_of_held_out_prompts_is_taken_out_of_the_training_ones(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("a cat\na dog\n")
    (tmp_path / "bench.csv").write_text(DRAWBENCH.replace("A red colored car.", "a dog"))
    imported = import_prompts(str(tmp_path / "all.txt"), heldout=str(tmp_path / "bench.csv"))
    assert imported.train == ("a cat",)
    assert len(imported.heldout) == 2
    assert imported.removed == 1


@pytest.mark.parametrize(
    ("name", "content", "arguments", "values"),
    [
        ("p.csv", "name,size\nx,1\n", {}, "text, prompt, prompts, caption; name, size --column"),
        ("p.csv", "text\nx\n", {"column": "title"}, "'title' --column"),
        ("p.jsonl", '{"text": 3}\n', {}, "p.jsonl, line 1 'text' 3;"),
        ("p.jsonl", '{"text": "a"}\n\n{"text": "\\ud83d"}\n', {}, "line 3, 'text' surrogate"),
        ("p.json", '["a", 3]', {}, "p.json, entry 2, 'text' 3;"),
        ("p.json", '{"a": 3}', {}, "p.json list"),
        ("p.json", "[" * 100_000, {}, "p.json JSON"),
        ("p.csv", "text,Text,text\na,b,c\n", {}, "p.csv 'text'"),
        ("p.jsonl", "[1]\n", {}, "line 1 object"),
        ("p.jsonl", "{\n", {}, "line 1 JSON"),
        ("p.jsonl", '{"text": "a"}\n{"txt": "b"}\n', {}, "line 2 'text' txt"),
        ("p.csv", 'text\na cat\n"a dog\na cow\n', {}, "p.csv, line 3: quotes"),
        ("p.csv", 'text\n"a" dog\n', {}, "p.csv, line 2: quotes"),
        ("p.csv", "id,prompt\n1,a red cat, on a mat\n", {}, "p.csv, line 2 3 fields, header 2 (id, prompt):"),
        ("p.csv", 'prompt,id\n"a\ncat",1\n\na dog\n', {}, "p.csv, line 5 1 fields, header 2 'a dog'"),
        ("p.tsv", "id\tprompt\n1\ta\tb\n", {}, "p.tsv, line 2 3 fields, header 2"),
        ("p.txt", "a\nb\n", {"heldout": "no.txt"}, "--heldout 'no.txt'"),
        ("p.txt", " \n", {}, "p.txt prompt"),
        ("p.txt", "a\nb\n", {"column": "title"}, "--column 'title', p.txt"),
        ("p.txt", "a\nb\n", {"heldout": 2}, "--heldout 2, p.txt 2 1 to 1"),
        ("p.txt", "a\n", {"heldout": 1}, "--heldout 1, p.txt 1 leave"),
        ("p.pdf", "x", {}, "p.pdf .txt, .parquet"),
    ],
)
def test_a_bad_source_is_one_sentence_with_file_line_and_value(
    name: str, content: str, arguments: dict[str, str | int], values: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as refused:
        import_prompts(str(tmp_path / name), **arguments)  # type: ignore[arg-type]
    assert all(value in str(refused.value) for value in values.split())


def test_a_source_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no \./nowhere; give a"):
        import_prompts("./nowhere")
    with pytest.raises(UserError, match="has neither a train nor a test file"):
        import_prompts(str(tmp_path))


@pytest.mark.parametrize(("source", "package"), [("owner/name", "datasets"), ("p.parquet", "pyarrow")])
def test_without_its_package_a_sentence_says_what_to_do(
    source: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    with pytest.raises(UserError, match=f"'{package}', which is not installed. Run pip install {package}, or export"):
        import_prompts(source)


def test_a_parquet_file_may_have_brackets_in_its_name(tmp_path: Path) -> None:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    file = tmp_path / "prompts [v2]*?.parquet"
    parquet.write_table(pyarrow.table({"n": [1, 2], "prompt": ["a cat", "a dog"]}), file)
    parquet.write_table(pyarrow.table({"prompt": ["another"]}), tmp_path / "prompts vXY.parquet")
    assert import_prompts(str(file)).train == ("a cat", "a dog")


@pytest.mark.parametrize(
    ("content", "expected"), [("a cat\na dog\n", ("a cat", "a dog")), ('{"text": "a cat"}\n', ("a cat",))]
)
def test_prompts_come_through_a_pipe(content: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_text, args=(content,), daemon=True).start()
    assert import_prompts(str(tmp_path / "pipe")).train == expected
    read, write = os.pipe()  # as <(…) of a shell
    os.write(write, content.encode())
    os.close(write)
    assert import_prompts(f"/dev/fd/{read}").train == expected
    os.close(read)


def test_a_field_beside_the_prompt_may_be_longer_than_131072_characters(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(f"image,text\n{'A' * 200_000},a cat\n")
    assert import_prompts(str(tmp_path / "p.csv")).train == ("a cat",)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a Git LFS pointer"),
        ("\n<!DOCTYPE html>\n<html></html>\n", "an HTML page"),
    ],
)
@pytest.mark.parametrize("name", ["p.txt", "p.csv", "p.json", "p.jsonl"])
def test_what_was_downloaded_in_place_of_prompts_is_named(content: str, what: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(UserError, match=what):
        import_prompts(str(file))
    if file.suffix in (".txt", ".jsonl") and content[0] != "\n":
        with pytest.raises(UserError, match=f"^prompts is .*{what}"):
            read_prompts(str(file))


def test_a_folder_of_pictures_may_have_parts_and_files_of_macos(tmp_path: Path) -> None:
    for part, texts in (("train", ["a cat", "a dog"]), ("test", ["a cow"])):
        (tmp_path / part).mkdir()
        for number, text in enumerate(texts):
            picture(number, 8).save(tmp_path / part / f"{number}.png")
            (tmp_path / part / f"{number}.txt").write_text(text)
            for hidden in (f"._{number}.png", f"._{number}.txt"):
                (tmp_path / part / hidden).write_bytes(b"\0\5\x16\7")
    (tmp_path / "._train").write_bytes(b"\0\5\x16\7")
    imported = import_prompts(str(tmp_path))
    assert (imported.train, imported.heldout) == (("a cat", "a dog"), ("a cow",))
    assert all(len(entry.references) == 1 for entries in imported.entries for entry in entries)


def test_files_with_other_prompts_are_overwritten_with_force_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.csv", tmp_path / "out"
    source.write_text("caption,prompt\nold words,a cat\n")
    command = ["prompts", "import", str(source), "--out", str(out)]
    assert main(command) == main(command) == 0
    assert "1 prompt, from column prompt\n" in capsys.readouterr().out
    assert main([*command, "--column", "caption"]) == 2
    assert "--force" in capsys.readouterr().err
    assert [p.text for p in read_prompts(str(out / "train.jsonl"))] == ["a cat"]
    assert main([*command, "--column", "caption", "--force"]) == 0
    assert "from column caption\n" in capsys.readouterr().out
    assert [p.text for p in read_prompts(str(out / "train.jsonl"))] == ["old words"]


def test_parts_with_other_columns_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.csv").write_text("text\na cat\n")
    (tmp_path / "test.csv").write_text("Caption\na dog\n")
    assert main(["prompts", "import", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "1 to train on, 1 held out, from column text and Caption\n" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a cat\n")
    imported = import_prompts(str(tmp_path / "p.txt"))
    with pytest.raises(UserError, match=r"^--out is '/proc/x', which cannot be written: /proc/x: its folder"):
        write_prompts(imported, Path("/proc/x"))


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_bytes("text\na cat\nKöln\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"p\.csv, line 3, is not UTF-8 text: .*xf6"):
        import_prompts(str(tmp_path / "p.csv"))


def test_a_run_does_not_take_a_table_for_lines_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.CSV").write_text("id,prompt\n1,a cat\n")
    with pytest.raises(UserError, match=r"^prompts is '.*p\.CSV'; convert it .* with `solrl prompts import"):
        read_prompts(str(tmp_path / "p.CSV"))
    (tmp_path / "p.JSONL").write_text('{"text": "a cat"}\n')
    assert [prompt.text for prompt in read_prompts(str(tmp_path / "p.JSONL"))] == ["a cat"]


def pictured(folder: Path, *names: str) -> list[bytes]:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        picture(number, 8).save(folder / name)
    return [(folder / name).read_bytes() for name in names]


SOURCES = {
    "list.jsonl": '{"text": "a", "reference": "x/1.png"}\n{"text": "a", "reference": ["x/2.png"]}\n',
    "list.csv": "prompt,reference\na,x/1.png\na,x/2.png\n",
    "x/metadata.jsonl": '{"file_name": "1.png", "text": "a"}\n{"file_name": "2.png", "text": "a"}\n',
    "x/metadata.csv": "file_name,caption\n1.png,a\n2.png,a\n",
    "x/1.txt": "a\n",
}


@pytest.mark.parametrize("name", SOURCES)
def test_references_of_a_list_or_a_folder_are_those_of_the_prompts_that_a_run_reads(name: str, tmp_path: Path) -> None:
    files = pictured(tmp_path / "x", "1.png", "2.png")
    (tmp_path / name).write_text(SOURCES[name])
    if name.endswith(".txt"):
        (tmp_path / "x/2.txt").write_text("a")
    source = tmp_path / name if name.startswith("list") else tmp_path / "x"
    out = tmp_path / "other/prompts"
    write_prompts(import_prompts(str(source)), out)
    read = read_prompts(str(out / "train.jsonl"))
    assert [prompt.text for prompt in read] == ["a", "a"]
    assert [Path(prompt.references[0].path).read_bytes() for prompt in read] == files
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [prompt.id for prompt in read]
    assert [line["reference"] for line in lines] == [["../../x/1.png"], ["../../x/2.png"]]


def test_pictures_are_found_from_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (file,) = pictured(tmp_path / "x", "1.png")
    (tmp_path / "x/1.txt").write_text("a")
    (tmp_path / "far/away/disk").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "far/away/disk")
    write_prompts(import_prompts(str(tmp_path / "x")), tmp_path / "out")
    (prompt,) = read_prompts(str(tmp_path / "out/train.jsonl"), seen=1)
    assert Path(prompt.references[0].path).read_bytes() == file


def test_a_picture_without_a_prompt_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    pictured(tmp_path / "x", "1.png", "2.png")
    (tmp_path / "x/1.txt").write_text("a")
    with pytest.raises(UserError, match=r"2\.png.*2\.txt"):
        import_prompts(str(tmp_path / "x"))
    (tmp_path / "x/2.png").write_bytes(b"")
    (tmp_path / "x/metadata.csv").write_text("file_name,text\n1.png,a\n2.png,b\n")
    with pytest.raises(UserError, match=r"^\S*metadata\.csv, line 3 .*2\.png"):
        import_prompts(str(tmp_path / "x"))
