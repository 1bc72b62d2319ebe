"""A path from an untrusted source opens only a regular file below its folder."""

import os

import pytest

from genlight.adapter.plumbing.safe_open import UnsafeFileError, open_below


def test_a_file_below_the_folder_is_opened(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("text")

    with os.fdopen(open_below(tmp_path, "a/b")) as file:
        assert file.read() == "text"


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "a/../b", "a//b", "link", "a\0b"])
def test_no_other_path_is_opened(path, tmp_path):
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    for file in (folder / "b", folder / "a" / "b", tmp_path / "outside"):
        file.write_text("text")
    (folder / "link").symlink_to(tmp_path / "outside")

    with pytest.raises(UnsafeFileError):
        open_below(folder, path)
