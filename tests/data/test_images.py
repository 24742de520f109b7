import gc
import gzip
import hashlib
import http.server
import os
import struct
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import workers_for_tests as workers
from leftovers import PROJECT
from torchvision.datasets import MNIST

from fsdp_helpers.data import source
from fsdp_helpers.data.images import Split, epoch_order, evaluation_batches, load_data, normalize, rank_batches
from fsdp_helpers.data.source import (
    FAILED_DOWNLOAD,
    MNIST_FILES,
    DataError,
    describe_source,
    find_data_dir,
    num_train_images,
    offline,
    prepare_data,
)
from fsdp_helpers.ranks.launch import launch

NAMES = [name for name, _ in MNIST.resources]
SMALL = "t10k-labels-idx1-ubyte.gz"  # the smallest of the four


def numbered(count: int) -> Split:
    """`count` images; image i is filled with i and labeled i, so that each can be recognized."""
    numbers = torch.arange(count)
    return Split(images=numbers.float().view(-1, 1, 1, 1).expand(-1, 1, 28, 28), labels=numbers)


class Mirror:
    """A local HTTP server in the place of a mirror of MNIST.

    `gets` counts how often each file was fetched, `asked` counts all requests, also those that found nothing.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.gets, self.asked = gets, asked = Counter(), Counter()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.removeprefix("/")
                asked[name] += 1
                self.send_response(200 if name in files else 404)
                self.send_header("Content-Length", str(len(files.get(name, b""))))
                self.end_headers()
                if self.headers.get("Method") != "HEAD":  # torchvision asks for redirects first, in this way
                    gets[name] += 1
                    self.wfile.write(files.get(name, b""))

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with warnings.catch_warnings():  # torchvision keeps each answer 404 open, in a cycle, until it is collected
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def md5_of(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def small_files() -> dict[str, bytes]:
    """Four files in MNIST's format: 8 training and 4 test images."""
    files = {}
    for part, count in (("train", 8), ("t10k", 4)):
        files[f"{part}-images-idx3-ubyte"] = struct.pack(">IIII", 0x803, count, 28, 28) + bytes(count * 784)
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">II", 0x801, count) + bytes(range(count))
    return files


@pytest.fixture
def small_packed(monkeypatch) -> dict[str, bytes]:
    """The small files, packed, which pass for MNIST as long as the test runs: name -> content."""
    files = small_files()
    packed = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}
    expected = {name: (len(content), md5_of(content)) for name, content in files.items()}
    monkeypatch.setattr(source, "MNIST_FILES", expected)
    monkeypatch.setattr(MNIST, "resources", [(name, md5_of(packed[name])) for name in NAMES])
    return packed


@pytest.fixture
def mirror(small_packed, monkeypatch):
    """A mirror with the small files. A test may spoil its `files` before it asks for them."""
    files = dict(small_packed)
    with Mirror(files) as server:
        server.files = files
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        yield server


@pytest.fixture
def empty_mirror(monkeypatch):
    """A mirror that answers, and has none of the files."""
    with Mirror({}) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        yield server


@pytest.fixture
def small_mnist(small_packed, tmp_path) -> Path:
    """A data folder with the small files, unpacked."""
    raw = tmp_path / "small" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in small_files().items():
        (raw / name).write_bytes(content)
    return tmp_path / "small"


def left_over(folder: Path) -> list[str]:
    """What a download leaves beside its lock file and the note that it failed."""
    return sorted(path.name for path in folder.iterdir() if path.name not in (".mnist.lock", FAILED_DOWNLOAD))


# ---------------------------------------------------------------- the download


def test_downloaded_once(mirror, tmp_path):
    assert prepare_data(tmp_path) == "mnist"
    assert prepare_data(tmp_path) == "mnist"  # found, not fetched again
    assert mirror.gets == dict.fromkeys(NAMES, 1)
    assert left_over(tmp_path) == ["MNIST"]
    dataset = load_data(tmp_path)
    assert (dataset.source, len(dataset.train), dataset.test.labels.tolist()) == ("mnist", 8, [0, 1, 2, 3])


def test_two_processes_starting_together_download_once(mirror, tmp_path):
    sources = launch(
        workers.prepare_together, tmp_path, mirror.url, MNIST.resources, source.MNIST_FILES, world_size=2, device="cpu"
    )
    assert sources == ["mnist", "mnist"]
    assert mirror.gets == dict.fromkeys(NAMES, 1)
    assert left_over(tmp_path) == ["MNIST"]


def put_packed(folder: Path, packed: dict[str, bytes]) -> None:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in packed.items():
        (raw / name).write_bytes(content)


def test_wrong_checksum_from_the_mirror(mirror, tmp_path):
    mirror.files[SMALL] = b"x" + mirror.files[SMALL][1:]
    with pytest.raises(DataError, match=f"the download of {SMALL} is damaged .*mirror is at fault"):
        prepare_data(tmp_path)
    assert left_over(tmp_path) == []  # nothing that a later run could take for whole


def test_a_download_that_failed_is_not_tried_again_for_an_hour(empty_mirror, tmp_path):
    asked = []
    for age_s in (None, 0, 3500, 3700, -3700):  # the age of the note when the data are asked for once more
        if age_s is not None:
            when_s = time.time() - age_s
            os.utime(tmp_path / FAILED_DOWNLOAD, (when_s, when_s))
        before = empty_mirror.asked.total()
        assert prepare_data(tmp_path) == "digits"
        asked.append(empty_mirror.asked.total() > before)
    # Tried at first, and after more than an hour; a note from the future says nothing.
    assert asked == [True, False, False, True, True]


def test_the_note_of_a_failed_download_can_be_deleted(mirror, tmp_path):
    files = dict(mirror.files)
    mirror.files.clear()
    assert prepare_data(tmp_path) == "digits"
    mirror.files.update(files)
    assert prepare_data(tmp_path) == "digits"
    assert f"to try again now, delete {tmp_path}/{FAILED_DOWNLOAD}." in describe_source("digits", tmp_path)
    assert "into the folder ./MNIST/raw" in describe_source("digits", ".")
    (tmp_path / FAILED_DOWNLOAD).unlink()  # as typed, it's there
    assert prepare_data(tmp_path) == "mnist"


def test_packed_files_need_no_download_after_one_that_failed(small_packed, digits_dir):
    assert prepare_data(digits_dir) == "digits"
    put_packed(digits_dir, small_packed)
    assert prepare_data(digits_dir) == "mnist"
    assert not (digits_dir / FAILED_DOWNLOAD).exists()


# ---------------------------------------------------------------- without a network, on purpose


@pytest.mark.parametrize("value, expected", [(None, False), ("", False), ("0", False), ("1", True)])
def test_what_asks_for_the_digits(value, expected, monkeypatch):
    monkeypatch.delenv("FSDP_OFFLINE", raising=False)
    if value is not None:
        monkeypatch.setenv("FSDP_OFFLINE", value)
    assert offline() is expected


def test_offline_means_the_digits_and_no_download(empty_mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_OFFLINE", "1")
    folder = tmp_path / "data"
    assert prepare_data(folder) == "digits"
    assert load_data(folder).source == "digits"
    assert empty_mirror.asked.total() == 0 and not folder.exists()
    assert "because FSDP_OFFLINE is set. To use MNIST, unset it." in describe_source("digits", folder)


def test_the_digits_are_those_that_scikit_learn_loads(monkeypatch):
    from sklearn.datasets import load_digits

    monkeypatch.setenv("FSDP_OFFLINE", "1")
    data, theirs = load_data(), load_digits()
    assert (len(data.train), len(data.test), num_train_images("digits")) == (1437, 360, 1437)
    assert (data.source, data.train.images.shape) == ("digits", (1437, 1, 28, 28))
    assert data.train.labels.tolist() + data.test.labels.tolist() == theirs.target.tolist()
    pixels = torch.from_numpy(theirs.images).float().unsqueeze(1) * (255 / 16)
    large = torch.nn.functional.interpolate(pixels, size=(28, 28), mode="bilinear").squeeze(1)
    assert torch.equal(torch.cat([data.train.images, data.test.images]), normalize(large))


def test_offline_means_the_digits_also_where_mnist_is(small_mnist, monkeypatch):
    assert (prepare_data(small_mnist), load_data(small_mnist).source) == ("mnist", "mnist")
    monkeypatch.setenv("FSDP_OFFLINE", "1")
    assert (prepare_data(small_mnist), load_data(small_mnist).source) == ("digits", "digits")


# ---------------------------------------------------------------- what is on disk


def test_contents_are_hashed_once_and_not_by_every_rank(small_mnist, monkeypatch):
    hashed = []
    md5 = source._md5
    monkeypatch.setattr(source, "_md5", lambda path: hashed.append(path.name) or md5(path))
    assert prepare_data(small_mnist) == "mnist"
    assert sorted(hashed) == sorted(MNIST_FILES)
    for _ in range(3):  # as three ranks do
        assert len(load_data(small_mnist).train) == 8
    assert len(hashed) == 4


def test_loading_checks_sizes(small_mnist):
    labels = small_mnist / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1])
    # 4 labels behind a header of 8 bytes, and one of them is gone
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte is damaged: 11 bytes instead of 12"):
        load_data(small_mnist)


@pytest.mark.parametrize("name", ["t10k-labels-idx1-ubyte", SMALL])
def test_truncated_file_is_named(name, small_packed, tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    whole = small_packed[SMALL]
    (raw / name).write_bytes((whole if name == SMALL else gzip.decompress(whole))[:-1])
    with pytest.raises(DataError, match=f"{name} is damaged: .*Delete it and run again"):
        prepare_data(tmp_path)
    assert (raw / name).exists()  # the reader deletes it, nobody else


def test_changed_file_of_the_right_size_is_named(small_mnist):
    labels = small_mnist / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    content = bytearray(labels.read_bytes())
    content[-1] ^= 1
    labels.write_bytes(content)
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte is damaged: its checksum is wrong"):
        prepare_data(small_mnist)


def test_read_only_folder_without_mnist(tmp_path, monkeypatch):
    # Root may write anywhere, so the attempt is made as nobody, who may look into this one folder.
    before = os.geteuid()
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o555)
    if before == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(
            DataError, match=r"can't be created or written to \(Permission denied\). Choose another folder"
        ):
            prepare_data("data")
    finally:
        os.seteuid(before)
        tmp_path.chmod(0o755)
    assert left_over(tmp_path) == []


def test_read_only_folder_with_mnist_is_fine(mnist_dir, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("wrote to a folder that has all it needs")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("fsdp_helpers.data.source.FileLock", refuse)
    assert prepare_data(mnist_dir) == "mnist"


def test_a_folder_in_one_that_does_not_exist_is_refused_and_not_made(tmp_path):
    with pytest.raises(DataError, match=r"mistyped/data, which can't be created .*No such file"):
        prepare_data(tmp_path / "mistyped" / "data")
    assert [*tmp_path.iterdir()] == []


def test_the_folder_is_named_as_it_was_given(tmp_path, monkeypatch):
    """From any folder, what the message names is there; a notebook's output has no path of a machine."""
    assert f"delete {tmp_path}/x/{FAILED_DOWNLOAD}." in describe_source("digits", tmp_path / "x")
    monkeypatch.setenv("FSDP_DATA_DIR", "own/images")
    assert f"delete own/images/{FAILED_DOWNLOAD}." in describe_source("digits")
    monkeypatch.delenv("FSDP_DATA_DIR")
    monkeypatch.chdir(PROJECT / "notebooks")
    assert f"delete ../data/{FAILED_DOWNLOAD}." in describe_source("digits")


def test_an_installed_wheel_keeps_its_data_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("FSDP_DATA_DIR", raising=False)
    monkeypatch.setattr(source, "__file__", str(tmp_path / "site-packages" / "fsdp_helpers" / "data" / "source.py"))
    assert find_data_dir() == Path("data")


def test_find_data_dir_order(monkeypatch, tmp_path):
    monkeypatch.setenv("FSDP_DATA_DIR", str(tmp_path / "variable"))
    assert find_data_dir(tmp_path / "argument") == tmp_path / "argument"
    assert find_data_dir() == tmp_path / "variable"
    monkeypatch.delenv("FSDP_DATA_DIR")
    assert find_data_dir() == Path(__file__).resolve().parents[2] / "data"


def test_the_source_is_always_said(digits_dir):
    assert describe_source("mnist") == "Data: MNIST, 60,000 training and 10,000 test images."
    text = describe_source("digits", digits_dir)
    assert "1,797 bundled digits" in text and "MNIST/raw" in text


# ---------------------------------------------------------------- what is in them


def test_mnist_is_whole_and_normalized(mnist_dir):
    dataset = load_data(mnist_dir)
    assert dataset.train.images.shape == (60_000, 1, 28, 28) and dataset.train.images.dtype == torch.float32
    assert dataset.test.images.shape == (10_000, 1, 28, 28) and dataset.test.labels.dtype == torch.int64
    # The two constants are the mean and the standard deviation of the training images, to four digits.
    assert abs(dataset.train.images.mean().item()) < 1e-3
    assert abs(dataset.train.images.std().item() - 1) < 1e-3
    assert num_train_images("mnist") == len(dataset.train)


def test_normalize():
    # 0 -> (0 - 0.1307) / 0.3081 = -0.42421; 255 -> (1 - 0.1307) / 0.3081 = 2.82149
    values = normalize(torch.tensor([[[0, 255]]], dtype=torch.uint8))
    assert values.shape == (1, 1, 1, 2)
    assert values.flatten().tolist() == pytest.approx([-0.42421, 2.82149], abs=1e-5)


# ---------------------------------------------------------------- batches


def labels_of_epoch(world_size: int, epoch: int = 0, seed: int = 0, **settings) -> list[list[int]]:
    """The labels of each global batch, the ranks' parts one after the other."""
    parts = [
        rank_batches(
            numbered(100),
            rank=rank,
            world_size=world_size,
            global_batch_size=12,
            seed=seed,
            epoch=epoch,
            **settings,
        )
        for rank in range(world_size)
    ]
    return [torch.cat([labels for _, labels in step]).tolist() for step in zip(*parts, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rank_batches_together_are_the_one_process_batch(world_size):
    assert labels_of_epoch(world_size) == labels_of_epoch(1)


def test_incomplete_last_batch_is_dropped():
    # 100 images in batches of 12: 8 batches are 96 images, 4 are left out
    batches = labels_of_epoch(1)
    assert [len(batch) for batch in batches] == [12] * 8
    assert len({label for batch in batches for label in batch}) == 96


def test_images_go_with_their_labels():
    batches = rank_batches(numbered(100), rank=1, world_size=2, global_batch_size=12, seed=0, epoch=0)
    for images, labels in batches:
        assert images.shape == (6, 1, 28, 28)
        assert torch.equal(images[:, 0, 0, 0], labels.float())


def test_new_shuffle_each_epoch_same_for_the_same_seed():
    assert labels_of_epoch(1, epoch=1) != labels_of_epoch(1, epoch=0)
    assert labels_of_epoch(1, seed=1) != labels_of_epoch(1, seed=0)
    assert labels_of_epoch(1, seed=1) != labels_of_epoch(1, epoch=1)  # nor do two runs share an order an epoch apart
    assert labels_of_epoch(1, epoch=1) == labels_of_epoch(1, epoch=1)
    assert labels_of_epoch(3, epoch=1) == labels_of_epoch(1, epoch=1)
    assert sorted(epoch_order(100, seed=0, epoch=1)) == list(range(100))


def test_first_step_skips():
    assert labels_of_epoch(2, first_step=3) == labels_of_epoch(2)[3:]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("num_images", [10_000, 1_003, 2])
def test_evaluation_counts_each_image_once(world_size, num_images):
    split = numbered(num_images)
    ranks = [
        [labels for _, labels in evaluation_batches(split, rank=rank, world_size=world_size)]
        for rank in range(world_size)
    ]
    seen = torch.cat([labels for rank in ranks for labels in rank])
    assert sorted(seen.tolist()) == list(range(num_images))
    # Batches of 1,000: 10,000 make 10, 1,003 make 2, 2 make 1, on every rank
    assert {len(rank) for rank in ranks} == {-(-num_images // 1000)}


def test_the_first_images_of_each_split(digits_dir):
    whole, part = load_data(digits_dir), load_data(digits_dir, train_images=3, test_images=2)
    assert torch.equal(part.train.images, whole.train.images[:3])
    assert torch.equal(part.test.labels, whole.test.labels[:2])
    assert len(load_data(digits_dir, test_images=99_999).test) == 360  # all, where there are fewer
    # 3 images of 784 x 4 bytes, 3 labels of 8 bytes; nothing of the whole is kept alive behind them
    assert part.train.images.untyped_storage().nbytes() == 3 * 784 * 4
    assert part.train.labels.untyped_storage().nbytes() == 3 * 8
