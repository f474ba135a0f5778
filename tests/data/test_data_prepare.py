"""Own text becomes tokens on disk: every format, within bounded memory, through crashes and full disks."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from andon.config.load import load
from andon.data.build import Corpus, prepare
from andon.data.cache import find, receive
from andon.data.sources import PIECE_BYTES, Counts, Piece, documents, find_files
from andon.data.stories import stories
from andon.data.token_set import TokenSet
from andon.data.tokenizer import Tokenizer
from andon.errors import UserError
from andon.run.prepare import prepare_tokens

END = 256


def read(*paths: Path | str) -> tuple[list[Piece], Counts]:
    counts = Counts()
    return list(documents(find_files([str(path) for path in paths]), counts)), counts


def texts(*paths: Path | str) -> list[str]:
    """The documents of these paths, each put together again."""
    whole = [""]
    for piece in read(*paths)[0]:
        whole[-1] += piece.text
        whole += [""] if piece.ends else []
    assert whole.pop() == "", "the last piece did not end its document"
    return whole


def in_bytes(*paths: Path | str) -> Corpus:
    return Corpus(tuple(map(str, paths)), "bytes")


def temporaries(cache: Path) -> list[Path]:
    return list(cache.glob(".tmp-*"))


def write_parquet(file: Path, values: list[str | None], column: str = "text") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"n": list(range(len(values))), column: values}), file, row_group_size=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One document in .txt, two in .jsonl, two in .parquet, and files that are none of its business."""
    folder = tmp_path / "texts"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    (folder / "a.txt").write_text("one\n")
    (folder / "deep" / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "thr\\u00e9e", "n": 1}')
    write_parquet(folder / "deep" / "c.parquet", ["four", "", "five"])
    (folder / "README.rst").write_text("not this")
    (folder / ".d.txt").write_text("nor this")
    (folder / "deep" / ".hidden" / "e.txt").write_text("nor this")
    return folder


# Sources


def test_a_folder_is_read_in_order_and_hidden_files_are_not(folder: Path) -> None:
    assert texts(folder) == ["one\n", "two", "thrée", "four", "five"]
    assert read(folder)[1].documents == 5
    assert read(folder)[1].read == sum(file.stat().st_size for file in find_files([str(folder)]))


def test_globs_files_and_links_are_read_once(folder: Path) -> None:
    (folder / "z.txt").symlink_to(folder / "a.txt")
    named = (folder / "a.txt", folder / "z.txt", folder / "*.txt")
    assert texts(folder / "**" / "*.jsonl", *named) == ["one\n", "two", "thrée"]


def test_a_link_is_followed_only_if_it_is_named_itself(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(elsewhere / "secret.txt")
    (folder / "dangling.txt").symlink_to(elsewhere / "nothing")
    (folder / "linked").symlink_to(elsewhere)
    links: list[Path] = []
    found = find_files([str(folder)], links=links) + find_files([str(folder / "*.txt"), str(folder / "**" / "*.txt")])
    assert not [file for file in found if b"secret" in file.read_bytes()]
    assert sorted(link.name for link in links) == ["dangling.txt", "link.txt", "linked"]
    assert texts(folder / "link.txt", folder / "linked") == ["secret"]


def test_skipped_links_and_invalid_text_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "link.txt").symlink_to(folder / "a.txt")
    for name in ("b.txt", "c.txt", "d.txt"):
        (folder / name).write_bytes(b"a\xff")
    for _ in range(2):  # the second time from the cache
        config = load(
            None, {"data.corpus": [str(folder)], "data.tokenizer": "bytes", "data.cache": str(tmp_path / "c")}
        )
        prepare_tokens(config, console := Console(file=io.StringIO(), width=40))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "1 symbolic link in the corpus not followed: link.txt\n" in shown
        assert (
            f"3 places not valid UTF-8, read as U+FFFD, in 3 files: {folder / 'b.txt'}, {folder / 'c.txt'}, …" in shown
        )


def test_a_relative_path_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert texts("deep/*.parquet", "a.txt") == ["one\n", "four", "five"]


@pytest.mark.parametrize("missing", ["nowhere", "*.jsonl", "empty"])
def test_nothing_found_is_an_error(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="No text found at"):
        find_files([str(tmp_path / missing)])


def test_a_file_of_an_unknown_kind_is_an_error(folder: Path) -> None:
    with pytest.raises(UserError, match=r"README.rst is not a kind of text file"):
        find_files([str(folder / "README.rst")])


def test_markdown_json_and_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# one\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n{"text": "four"}\n'))
    (tmp_path / "d.json").write_text('[{"text": "five"}, "six"]')
    (tmp_path / "e.json").write_text('{"text": "seven"}\n{"text": "eight"}\n')
    assert texts(tmp_path) == ["# one\n", "two", "three", "four"]  # .json is as often settings: it must be named
    assert texts(tmp_path / "*.json") == ["five", "six", "seven", "eight"]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two")[:-9])
    with pytest.raises(UserError, match=r"b.txt.gz cannot be read"):
        texts(tmp_path)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    lead=st.integers(0, 4),
    unit=st.sampled_from(["é", "日", "🙂", "a\n", "ab日🙂\n", "x" * 40 + "\n"]),
    extra=st.integers(-3, 3),
    copies=st.integers(1, 3),
)
def test_pieces_are_never_cut_inside_a_character(
    tmp_path_factory: pytest.TempPathFactory, lead: int, unit: str, extra: int, copies: int
) -> None:
    text = "a" * lead + unit * (copies * PIECE_BYTES // len(unit.encode()) + extra)
    file = tmp_path_factory.mktemp("pieces") / "a.txt"
    file.write_text(text, newline="")
    pieces, counts = read(file)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.text.encode()) <= PIECE_BYTES for piece in pieces)
    assert (counts.replaced, counts.bytes, counts.documents) == (0, len(text.encode()), 1)
    if "\n" in unit:
        assert all(piece.text.endswith("\n") for piece in pieces[:-1])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_very_long_row_comes_in_pieces(tmp_path: Path, kind: str) -> None:
    text = "日本語 " * PIECE_BYTES
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps({"text": text}) + "\n" + '{"text": "next"}')
    else:
        write_parquet(file, [text, "next"])
    assert texts(file) == [text, "next"]
    assert all(len(piece.text.encode()) <= PIECE_BYTES for piece in read(file)[0])


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfgood \xff bad \xe6\x97 \xef\xbf\xbd")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x\xffy"}\n{"text": "\\ud800"}')
    assert texts(tmp_path) == ["good \ufffd bad \ufffd \ufffd", "x\ufffdy", "\ufffd\ufffd\ufffd"]
    assert read(tmp_path)[1].replaced == 2 + 1 + 3
    (tmp_path / "c.json").write_bytes(b'[{"text": "x\xffy"}, "\xff"]')
    assert read(tmp_path / "c.json")[1].replaced == 2


@pytest.mark.parametrize("line", ["{", "[1]", '{"txt": "a"}', '{"text": null}', '"text"', "[" * 100_000])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n\n' + line)
    with pytest.raises(UserError, match=r"a.jsonl: line 3 has no text"):
        read(file)


def test_a_parquet_file_without_text_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, ["x"], column="content")
    with pytest.raises(UserError, match="its columns are n, content"):
        read(file)
    write_parquet(file, ["x", None])
    with pytest.raises(UserError, match=r"row 2 has no text"):
        read(file)
    file.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(UserError, match=r"a.parquet: the table after row 0 has no text"):
        read(file)


def test_without_pyarrow_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'andon\[parquet\]'"):
        read(folder)


# Token sets


def test_every_document_ends_with_the_end_token(folder: Path, tmp_path: Path) -> None:
    made = prepare(in_bytes(folder), tmp_path / "cache")
    expected = [id for text in ["one\n", "two", "thrée", "four", "five"] for id in [*text.encode(), END]]
    assert made.read(0, made.token_count).tolist() == expected
    assert (made.vocab_size, made.meta["documents"], made.meta["replaced"]) == (257, 5, 0)
    assert made.bytes_per_token == (made.token_count - 5) / made.token_count
    assert made.meta["source"] == "a.txt, b.jsonl, c.parquet"
    made.verify()


def test_the_built_in_stories_are_learned_and_told_again(tmp_path: Path) -> None:
    corpus = Corpus(vocab_size=500, stories_count=200, stories_seed=3)
    made = prepare(corpus, tmp_path)
    tokenizer = made.tokenizer()
    told = tokenizer.decode(made.read(0, made.token_count).tolist()).split("<|endoftext|>")
    assert told == [*stories(3, 200), ""]
    assert made.vocab_size == tokenizer.vocab_size == 500
    assert prepare(corpus, tmp_path).digest == made.digest
    assert prepare(Corpus(vocab_size=500, stories_count=199, stories_seed=3), tmp_path).digest != made.digest


def test_a_given_tokenizer_is_used(folder: Path, tmp_path: Path) -> None:
    Tokenizer.train(["one two three four"], 270).save(tmp_path)
    made = prepare(Corpus((str(folder),), str(tmp_path)), tmp_path / "cache")
    assert made.tokenizer().digest() == Tokenizer.load(tmp_path).digest()
    assert made.meta["tokenizer"] == Tokenizer.load(tmp_path).digest()


def test_a_vocabulary_above_65536_takes_four_bytes_a_token(folder: Path, tmp_path: Path) -> None:
    large = json.loads(Tokenizer.bytes().to_json())
    large["added_tokens"].append({**large["added_tokens"][0], "id": 70_000, "content": "<last>"})
    large["model"]["vocab"] |= {"<|endoftext|>": END, "<last>": 70_000}
    (tmp_path / "tokenizer.json").write_text(json.dumps(large))
    (folder / "a.txt").write_text("one<last>")
    made = prepare(Corpus((str(folder / "a.txt"),), str(tmp_path)), tmp_path / "cache")
    assert (made.meta["dtype"], made.vocab_size) == ("<u4", 70_001)
    assert made.read(0, made.token_count).tolist() == [*b"one", 70_000, END]


def test_reads_cross_shard_boundaries(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1_000).translate(bytes([*range(128)] * 2))
    (tmp_path / "a.txt").write_bytes(data)
    made = prepare(in_bytes(tmp_path / "a.txt"), tmp_path / "cache", shard_tokens=97)
    assert len(made.meta["shards"]) == 11
    row = [*data, END]
    for start in range(0, 1_001, 13):
        for count in {0, 1, 97, 300, 1_001 - start}:
            assert made.read(start, min(count, 1_001 - start)).tolist() == row[start : start + count]
    assert made.read(0, 5).dtype == np.int64
    one = prepare(in_bytes(tmp_path / "a.txt"), tmp_path / "cache")
    assert (one.digest, len(one.meta["shards"])) == (made.digest, 1)


def test_a_second_start_reads_neither_text_nor_tokens(folder: Path, tmp_path: Path) -> None:
    for file in find_files([str(folder)]):
        os.utime(file, (1e9, 1e9))
    phases: list[str] = []
    first = prepare(in_bytes(folder), tmp_path, lambda phase, done, total: phases.append(phase))
    assert set(phases) == {"reading", "tokenizing"}
    written = (first.folder / "meta.json").stat()
    phases.clear()
    second = prepare(in_bytes(folder), tmp_path, lambda phase, done, total: phases.append(phase))
    assert (second.folder / "meta.json").stat().st_ino == written.st_ino
    assert phases == []


def test_the_same_text_elsewhere_shares_the_cache(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = prepare(in_bytes(folder), cache)
    shutil.move(folder, tmp_path / "moved")
    assert prepare(in_bytes(tmp_path / "moved"), cache).folder == first.folder
    (tmp_path / "moved" / "a.txt").write_text("uno\n")
    assert prepare(in_bytes(tmp_path / "moved"), cache).folder != first.folder
    assert prepare(Corpus((str(tmp_path / "moved"),), "bpe", 300), cache).folder != first.folder


def test_a_file_that_changes_within_a_tick_of_the_clock_is_read_again(tmp_path: Path) -> None:
    file, now = tmp_path / "a.txt", time.time_ns()
    digests = []
    for text in ("one", "two"):  # of the same length, and written at the same time
        file.write_text(text)
        os.utime(file, ns=(now, now))
        digests.append(prepare(in_bytes(file), tmp_path / "cache").digest)
    assert digests[0] != digests[1]


def test_every_tokenizer_has_tokens_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two one two three " * 50)
    for name, text in (("ones", "one one one"), ("twos", "two two two")):
        (tmp_path / name).mkdir()
        Tokenizer.train([text], 270).save(tmp_path / name)
    settings = [("bytes", 300), ("bpe", 260), ("bpe", 262)]
    settings += [(str(tmp_path / name), 300) for name in ("ones", "twos")]
    made = [prepare(Corpus((str(tmp_path / "a.txt"),), *each), tmp_path / "cache") for each in settings for _ in "12"]
    assert [one.folder for one in made[::2]] == [again.folder for again in made[1::2]]
    assert len({each.folder for each in made}) == 5
    assert len({each.digest for each in made}) == 5


def test_a_spoiled_index_is_only_a_slower_start(folder: Path, tmp_path: Path) -> None:
    first = prepare(in_bytes(folder), tmp_path)
    (tmp_path / "digests.json").write_text('{"half')
    assert prepare(in_bytes(folder), tmp_path).folder == first.folder


def test_progress_runs_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words and more\n" * 100_000)
    calls: list[tuple[str, int, int]] = []
    corpus = Corpus((str(tmp_path / "a.txt"),), "bpe", 300)
    prepare(corpus, tmp_path / "cache", lambda *call: calls.append(call))
    for phase in ("reading", "training the tokenizer", "tokenizing"):
        done = [done for name, done, total in calls if name == phase]
        assert len(done) > 1 and done == sorted(done) and done[-1] == 2_000_000
    assert {total for _, _, total in calls} == {2_000_000}


@pytest.mark.parametrize("content", ["", "\ufeff"])
def test_a_corpus_without_text_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    for corpus in (in_bytes(tmp_path / "a.txt"), Corpus((str(tmp_path / "a.txt"),))):
        with pytest.raises(UserError, match=r"There is no text in a.txt"):
            prepare(corpus, tmp_path / "cache")
    assert not temporaries(tmp_path / "cache")


def test_a_text_that_grows_meanwhile_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")

    def grow(phase: str, done: int, total: int) -> None:
        if phase == "tokenizing":
            file.write_text("one and two")

    with pytest.raises(UserError, match="changed while they were being tokenized"):
        prepare(in_bytes(file), tmp_path / "cache", grow)
    assert prepare(in_bytes(file), tmp_path / "cache").token_count == 12


def test_a_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    made = prepare(in_bytes(folder), tmp_path, shard_tokens=10)
    shard = made.folder / "tokens-00001.bin"
    good = shard.read_bytes()
    shard.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(UserError, match=r"tokens-00001.bin is damaged\nits BLAKE3"):
        TokenSet.open(made.folder).verify()
    shard.write_bytes(good[:-1])
    with pytest.raises(UserError, match=r"tokens-00001.bin is damaged\nit has 19 bytes instead of 20"):
        prepare(in_bytes(folder), tmp_path, shard_tokens=10)
    shard.unlink()
    with pytest.raises(UserError, match=r"tokens-00001.bin is damaged\nNo such file"):
        TokenSet.open(made.folder)
    shard.write_bytes(good)
    TokenSet.open(made.folder).verify()
    (made.folder / "tokenizer.json").write_text(Tokenizer.train(["a a"], 258).to_json())
    with pytest.raises(UserError, match=r"tokenizer.json is damaged"):
        TokenSet.open(made.folder).verify()


def test_other_tokens_are_not_found_under_the_digest_of_these(folder: Path, tmp_path: Path) -> None:
    """Not even if meta.json has the BLAKE3 of the changed shard."""
    made = prepare(in_bytes(folder), tmp_path, shard_tokens=10)
    same = find(tmp_path, made.digest, TokenSet.open)
    assert same and same.folder == made.folder
    shard, meta = made.folder / "tokens-00001.bin", made.folder / "meta.json"
    before = blake3(shard.read_bytes()).hexdigest()
    shard.write_bytes(bytes(20))
    meta.write_text(meta.read_text().replace(before, blake3(bytes(20)).hexdigest()))
    assert find(tmp_path, made.digest, TokenSet.open) is None
    with pytest.raises(UserError, match=r"meta.json is damaged\nits digest is not that of the tokens"):
        TokenSet.open(made.folder).verify()


def test_data_that_arrives_again_leaves_the_received_data_to_its_readers(folder: Path, tmp_path: Path) -> None:
    made, cache = prepare(in_bytes(folder), tmp_path / "theirs"), tmp_path / "mine"

    def fill(into: Path) -> None:
        shutil.copytree(made.folder, into, dirs_exist_ok=True)

    kept = receive(cache, made.digest, fill, TokenSet.open).folder
    inode = kept.stat().st_ino
    assert receive(cache, made.digest, fill, TokenSet.open).folder == kept and kept.stat().st_ino == inode
    (kept / "tokenizer.json").unlink()
    receive(cache, made.digest, fill, TokenSet.open).verify()
    assert kept.stat().st_ino != inode and not temporaries(cache)


EMPTY = '{"format": 1, "dtype": "<u2", "vocab_size": 1, "tokens": 0, "bytes": 0, "digest": "", "shards": []}'


@pytest.mark.parametrize("meta", ["", "[]", "{}", "[" * 99_999, '{"format": 99}', '{"format": 1, "shards": 3}', EMPTY])
def test_a_spoiled_meta_is_named(folder: Path, tmp_path: Path, meta: str) -> None:
    made = prepare(in_bytes(folder), tmp_path)
    (made.folder / "meta.json").write_text(meta)
    with pytest.raises(UserError, match=r"meta.json is damaged"):
        TokenSet.open(made.folder)


# Processes that run at the same time, die, or find no room

CHILD = """
import sys
from pathlib import Path
from andon.data.build import Corpus, prepare
from andon.errors import UserError

def wait(phase, done, total):
    if phase == sys.argv[3]:
        print("waiting", flush=True)
        sys.stdin.readline()

try:
    made = prepare(Corpus((sys.argv[1],), sys.argv[4], 2048), Path(sys.argv[2]), wait)
    made.verify()
    print(made.folder.name)
except UserError as error:
    sys.exit(str(error))
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
"""


def child(
    text: Path, cache: Path, wait_in: str = "", tokenizer: str = "bytes", file_limit: int | None = None
) -> subprocess.Popen[str]:
    def limit() -> None:
        if file_limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    pipe = subprocess.PIPE
    arguments = [sys.executable, "-c", CHILD, str(text), str(cache), wait_in, tokenizer]
    return subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=limit)


def until_waiting(process: subprocess.Popen[str]) -> None:
    assert process.stdout and process.stdout.readline() == "waiting\n"


def test_two_processes_prepare_the_same_corpus(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with child(folder, cache, "tokenizing") as one, child(folder, cache, "tokenizing") as two:
        until_waiting(one)
        until_waiting(two)
        assert len(temporaries(cache)) == 2
        results = [process.communicate("go\n") for process in (one, two)]
    assert one.returncode == two.returncode == 0, results
    assert results[0][0].splitlines()[0] == results[1][0].splitlines()[0]
    assert not temporaries(cache)


def test_after_a_kill_the_next_prepare_cleans_up_and_succeeds(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with child(folder, cache, "tokenizing") as process:
        until_waiting(process)
        process.kill()
    (stale,) = temporaries(cache)
    prepare(in_bytes(folder), cache).verify()
    assert not stale.exists()


def test_a_temporary_folder_of_another_machine_is_left_for_a_day(folder: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "cache" / ".tmp-0123456789ab-1-abcd"
    foreign.mkdir(parents=True)
    prepare(in_bytes(folder), tmp_path / "cache")
    assert foreign.exists()
    os.utime(foreign, (1e9, 1e9))
    prepare(in_bytes(folder), tmp_path / "cache")
    assert not foreign.exists()


def test_a_shard_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words " * 100_000)
    with child(tmp_path / "a.txt", tmp_path / "cache", file_limit=100_000) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.startswith(f"The token cache {tmp_path}/cache cannot be written\nFile too large"), errors
    assert len(errors.splitlines()) == 3
    assert [file.name for file in (tmp_path / "cache").iterdir()] in ([], ["digests.json"])


def test_a_cache_that_is_a_file_is_a_user_error(folder: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written\nFile exists"):
        prepare(in_bytes(folder), folder / "a.txt")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mount)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_is_a_user_error_and_harms_nothing(folder: Path, tmp_path: Path, small_disk: Path) -> None:
    prepare(in_bytes(folder), small_disk)
    (tmp_path / "a.txt").write_text("words " * 100_000)
    with pytest.raises(UserError, match=r"cannot be written\nNo space left on device"):
        prepare(in_bytes(tmp_path / "a.txt"), small_disk)
    assert not temporaries(small_disk)
    prepare(in_bytes(folder), small_disk).verify()


def test_a_read_only_cache_serves_what_it_holds(folder: Path, tmp_path: Path, small_disk: Path) -> None:
    prepare(in_bytes(folder), small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    prepare(in_bytes(folder), small_disk).verify()
    with pytest.raises(UserError, match=r"cannot be written\nRead-only file system"):
        prepare(in_bytes(folder / "a.txt"), small_disk)


# Memory


def write_prose(file: Path, megabytes: int) -> None:
    """Lines of words whose frequencies fall as in a natural language."""
    random_state = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdluécm日"))
    words = np.array(["".join(random_state.choice(letters, n)) for n in random_state.integers(1, 12, 50_000)])
    ranks = np.minimum(random_state.zipf(1.2, (40_000, 15)), len(words)) - 1
    block = ("\n".join(map(" ".join, words[ranks])) + "\n").encode()
    with file.open("wb") as stream:
        while stream.tell() < megabytes * 1_000_000:
            stream.write(block)


def peak_megabytes(text: Path, cache: Path, tokenizer: str) -> float:
    with child(text, cache, tokenizer=tokenizer) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return int(output.splitlines()[1]) / 1_000


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_memory_stays_bounded(tmp_path: Path, tokenizer: str) -> None:
    write_prose(tmp_path / "a.txt", 9 if tokenizer == "bpe" else 5)
    assert peak_megabytes(tmp_path / "a.txt", tmp_path / "cache", tokenizer) < 600


@pytest.mark.soak
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_memory_stays_bounded_for_a_large_text(tmp_path: Path, tokenizer: str) -> None:
    write_prose(tmp_path / "a.txt", 300)
    peak = peak_megabytes(tmp_path / "a.txt", tmp_path / "cache", tokenizer)
    print(f"{tokenizer}: peak {peak:.0f} MB")
    assert peak < 1_000


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_memory_stays_bounded_for_text_without_words(tmp_path: Path) -> None:
    letters = np.random.default_rng(0).choice(list(b"ACGTNacgtn"), 40_000_000)
    (tmp_path / "a.txt").write_bytes(letters.astype(np.uint8).tobytes())
    peak = peak_megabytes(tmp_path / "a.txt", tmp_path / "cache", "bpe")
    print(f"no words: peak {peak:.0f} MB")
    assert peak < 1_000
