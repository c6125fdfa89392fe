"""Files and folders that appear whole: what is there when a block fails, when a disk is full, and when two build the same."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from hf_longctx.checkpoint.folder import remove_leftovers
from hf_longctx.data.shards import write_table
from hf_longctx.whole_files import built_whole, written_whole


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let this process write no file of more bytes, as on a disk that has no more room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(path: Path, text: str) -> None:
    with written_whole(path) as partial:
        partial.write_text(text)


def test_a_file_takes_the_place_of_what_was_there(tmp_path):
    write(tmp_path / "page", "old")
    write(tmp_path / "page", "new")
    assert (tmp_path / "page").read_text() == "new"
    assert listed(tmp_path) == ["page"]


def test_where_a_file_has_no_room_the_old_one_stays_and_the_error_names_it(tmp_path):
    path = tmp_path / "page"
    write(path, "old")
    with room_for(1000), pytest.raises(OSError, match="File too large") as raised:
        write(path, "new" * 1000)
    assert raised.value.filename == str(path)
    assert path.read_text() == "old"
    assert listed(tmp_path) == ["page"]


def test_errors_of_other_files_are_raised_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError) as raised, written_whole(tmp_path / "page"):
        (tmp_path / "source").read_text()
    assert raised.value.filename == str(tmp_path / "source")
    assert listed(tmp_path) == []


@pytest.mark.parametrize("folder", ["nowhere", "file"])
def test_a_folder_that_cannot_be_written_is_named_by_the_file(folder, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises((FileNotFoundError, NotADirectoryError)) as raised:
        write(tmp_path / folder / "page", "new")
    assert raised.value.filename == str(tmp_path / folder / "page")


def test_an_error_that_names_the_file_in_its_text_alone_names_the_place_instead(tmp_path):
    with pytest.raises(OSError, match=r"^(?!.*writing-).*nowhere/table"):
        write_table(pa.table({"length": [1]}), tmp_path / "nowhere" / "table")


def test_links_and_who_may_read_a_file_stay(tmp_path):
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder" / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o600
    assert listed(tmp_path) == ["folder", "folder/real", "link"]


def test_what_a_process_that_was_killed_leaves_is_removed_like_other_leftovers(tmp_path):
    writing = written_whole(tmp_path / "report.html")
    writing.__enter__().write_text("half")
    (left,) = listed(tmp_path)
    remove_leftovers(tmp_path)
    assert left.startswith(".writing-report.html.")
    assert listed(tmp_path) == []


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build() -> None:
        with built_whole(tmp_path / "thing") as partial:
            (partial / "file").write_text("half")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        build()
    assert listed(tmp_path) == []


def test_of_two_builds_at_the_same_time_the_first_stays(tmp_path):
    with built_whole(tmp_path / "thing") as partial:
        (partial / "file").write_text("mine")
        (tmp_path / "thing").mkdir()
        (tmp_path / "thing" / "file").write_text("theirs")
    assert (tmp_path / "thing" / "file").read_text() == "theirs"
    assert listed(tmp_path) == ["thing", "thing/file"]
