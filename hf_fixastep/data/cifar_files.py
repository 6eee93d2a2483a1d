"""The published files of CIFAR-10 and CIFAR-100: recognised by their checksums, read in the official order.

Apart from the builders, because `datasets` replaces `open` and `os.path` in modules that hold one.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

from hf_fixastep.data.open_set import Rows
from hf_fixastep.hub.client import online


HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
SIDE = 32
PIXELS = 3 * SIDE * SIDE  # of a row: a red, a green and a blue plane


@dataclass(frozen=True)
class Batch:
    """One official file of images."""

    name: str
    md5: str  # of the file in the "python version"
    # Of the file in the "binary version", which is label bytes and pixels row by row; published by MXNet.
    sha1: str


@dataclass(frozen=True)
class Cifar:
    """The published files of one of the two sets."""

    title: str
    archive: str
    archive_md5: str
    folder: str  # inside the archive
    train: tuple[Batch, ...]
    test: tuple[Batch, ...]
    hub: str
    hub_folder: str
    label_columns: tuple[str, ...]  # in the order of the binary version; the last one is the class
    class_names: tuple[str, ...]
    train_size: int = 50_000
    test_size: int = 10_000

    @property
    def batches(self) -> dict[str, Batch]:
        return {batch.name: batch for batch in self.train + self.test}

    @property
    def advice(self) -> str:
        return f"download {self.archive} from {HOMEPAGE}"


CIFAR10 = Cifar(
    title="CIFAR-10",
    archive="cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    folder="cifar-10-batches-py",
    train=(
        Batch("data_batch_1", "c99cafc152244af753f735de768cd75f", "aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
        Batch("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec", "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
        Batch("data_batch_3", "54ebc095f3ab1f0389bbae665268c751", "1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
        Batch("data_batch_4", "634d18415352ddfa80567beed471001a", "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
        Batch("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb", "26e2849e66a845b7f1e4614ae70f4889ae604628"),
    ),
    test=(
        Batch("test_batch", "40351d587109b95175f43aff81a1287e", "67eb016db431130d61cd03c7ad570b013799c88c"),
    ),
    hub="uoft-cs/cifar10",
    hub_folder="plain_text",
    label_columns=("label",),
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)

CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
    shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
    telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR100 = Cifar(
    title="CIFAR-100",
    archive="cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    folder="cifar-100-python",
    train=(Batch("train", "16019d7e3df5f24257cddd939b257f8d", "e207cd2e05b73b1393c74c7f5e7bea451d63e08e"),),
    test=(Batch("test", "f0ef6b0ae62326f3e7ffdfab6717acfc", "8fb6623e830365ff53cf14adec797474f5478006"),),
    hub="uoft-cs/cifar100",
    hub_folder="cifar100",
    label_columns=("coarse_label", "fine_label"),
    class_names=tuple(CIFAR100_NAMES.split()),
)


def read_cifar(cifar: Cifar, data_dir: str | None) -> tuple[Rows, Rows]:
    """Train and test images in the official order, from the first source that is there."""
    root = _from_hub(cifar) if data_dir is None else Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"There is no folder {root}: make it, {cifar.advice} and put it there.")
    archive = root / cifar.archive
    if archive.is_file():
        return _read_pickles(cifar, _files_of_archive(cifar, archive), archive)
    for folder in (root, root / cifar.folder):
        files = {name: folder / name for name in cifar.batches if (folder / name).is_file()}
        if files:
            return _read_pickles(cifar, ((name, path.read_bytes()) for name, path in files.items()), folder)
    for folder in _parquet_folders(cifar, root):
        for pattern in ("{}*.parquet", "{}/*.parquet"):
            train, test = (sorted(folder.glob(pattern.format(split))) for split in ("train", "test"))
            if train or test:
                return _read_parquet(cifar, "train", train, folder), _read_parquet(
                    cifar, "test", test, folder
                )
    raise FileNotFoundError(
        f"{root} holds neither {cifar.archive} nor {cifar.folder} nor the parquet files of {cifar.hub}: "
        f"{cifar.advice} and put it there."
    )


def to_png(planes: np.ndarray) -> bytes:
    """One row of pixels as a PNG file."""
    file = io.BytesIO()
    image = PIL.Image.fromarray(planes.reshape(3, SIDE, SIDE).transpose(1, 2, 0))
    image.save(file, "PNG", compress_level=1)  # the default, 6, saves 2 percent
    return file.getvalue()


def _from_hub(cifar: Cifar) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                cifar.hub,
                repo_type="dataset",
                allow_patterns=f"{cifar.hub_folder}/*.parquet",
                local_files_only=not online(),
            )
        )
    except Exception as error:  # offline, unreachable, gone, full disk: the way out is the same
        raise ConnectionError(
            f"{cifar.title} cannot be fetched from {cifar.hub} on the Hub ({type(error).__name__}): "
            f"{cifar.advice} and pass the folder that holds it as data_dir."
        ) from error


# The official files


def _files_of_archive(cifar: Cifar, archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the batches. Nothing is extracted, so that no name in the archive can do harm."""
    digest = hashlib.md5(usedforsecurity=False)
    with archive.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    _check_md5(archive, digest.hexdigest(), cifar.archive_md5)
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            wanted = folder == cifar.folder and name in cifar.batches and member.isfile()
            if wanted and (content := tar.extractfile(member)):
                yield name, content.read()


def _read_pickles(cifar: Cifar, files: Iterable[tuple[str, bytes]], where: Path) -> tuple[Rows, Rows]:
    """Train and test images from the contents of the batches, which may come in any order."""
    found = {}
    for name, content in files:
        _check_md5(
            where / name, hashlib.md5(content, usedforsecurity=False).hexdigest(), cifar.batches[name].md5
        )
        batch = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        found[name] = Rows(batch[b"data"], np.array(batch[f"{cifar.label_columns[-1]}s".encode()]))
    missing = [name for name in cifar.batches if name not in found]
    if missing:
        raise FileNotFoundError(
            f"{where} lacks {', '.join(missing)} of the batches of {cifar.title}: {cifar.advice} again."
        )
    train, test = ([found[batch.name] for batch in batches] for batches in (cifar.train, cifar.test))
    return Rows(*map(np.concatenate, zip(*train, strict=True))), Rows(
        *map(np.concatenate, zip(*test, strict=True))
    )


def _check_md5(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise ValueError(
            f"{path} has the MD5 {found}, but the official file has {expected}: it is damaged, incomplete or "
            f"not the original; download it again from {HOMEPAGE}."
        )


class ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and numpy arrays; whatever else a pickle names is not even looked up."""

    ALLOWED = {("numpy", "dtype"), ("numpy", "ndarray"), ("numpy._core.multiarray", "_reconstruct")}

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.")  # as it was called when the files were made
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(
                f"The pickle asks for {module}.{name}, but a CIFAR batch holds only plain values and numpy "
                "arrays: do not use this file."
            )
        return super().find_class(module, name)


# Parquet files of the Hub


def _parquet_folders(cifar: Cifar, root: Path) -> Iterator[Path]:
    for parent in (root, root / cifar.hub.split("/")[1]):
        yield from (parent, parent / cifar.hub_folder, parent / "data")


def _read_parquet(cifar: Cifar, split: str, files: list[Path], folder: Path) -> Rows:
    """The rows of all shards of a split, in the official order."""
    batches, size = (cifar.train, cifar.train_size) if split == "train" else (cifar.test, cifar.test_size)
    tables = [_open_parquet(cifar, file) for file in files]
    found = sum(table.metadata.num_rows for table in tables)
    if found != size:
        raise ValueError(
            f"The parquet files of {split} in {folder} hold {found} rows, but {cifar.title} has {size}: "
            f"download all parquet files of {cifar.hub}."
        )
    pixels = np.empty((size, PIXELS), np.uint8)
    labels = np.empty((size, len(cifar.label_columns)), np.uint8)
    row = 0
    for file, table in zip(files, tables, strict=True):
        for chunk in table.iter_batches(1000, columns=["img", *cifar.label_columns]):
            for column, name in enumerate(cifar.label_columns):
                labels[row : row + len(chunk), column] = chunk[name].to_numpy(zero_copy_only=False)
            for content in chunk["img"].field("bytes").to_pylist():
                pixels[row] = _planes(content, file)
                row += 1
    order = _official_order(batches, pixels, labels)
    if order is None:
        raise ValueError(
            f"The parquet files of {split} in {folder} hold other images or labels than {cifar.title}, or "
            "not batch by batch, so that the official order is unknown: download the parquet files of "
            f"{cifar.hub}."
        )
    return Rows(pixels[order], labels[order, -1].astype(np.int64))


def _open_parquet(cifar: Cifar, file: Path) -> pq.ParquetFile:
    try:
        table = pq.ParquetFile(file)
    except pa.ArrowException as error:
        raise ValueError(
            f"{file} is no complete parquet file: download it again from {cifar.hub}."
        ) from error
    schema = table.schema_arrow
    labels = [schema.field(name) for name in cifar.label_columns if name in schema.names]
    fits = len(labels) == len(cifar.label_columns) and all(
        pa.types.is_integer(label.type) for label in labels
    )
    image = schema.field("img").type if "img" in schema.names else pa.null()
    if not fits or not pa.types.is_struct(image) or image.get_field_index("bytes") < 0:
        raise ValueError(
            f"{file} has the columns {', '.join(schema.names)}, but {cifar.hub} has encoded images in img "
            f"and numbers in {' and '.join(cifar.label_columns)}: put its own parquet files there."
        )
    return table


def _planes(content: bytes | None, file: Path) -> np.ndarray:
    try:
        with PIL.Image.open(io.BytesIO(content or b""), formats=("PNG", "WEBP")) as image:
            if image.size != (SIDE, SIDE):  # before it is decoded, as it might be huge
                raise ValueError(f"an image is {image.size[0]}x{image.size[1]}")
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1).reshape(PIXELS)
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(
            f"{file} holds something else than PNG or WebP images of {SIDE}x{SIDE} pixels: download it again."
        ) from error


def _official_order(batches: tuple[Batch, ...], pixels: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """The row numbers that put the batches, recognised by their checksums, in order; None if they are others.

    The official files come as batch 1 to 5; the Hub's rows follow the archive, which starts with batch 4.
    """
    blocks = {}
    for rows in np.split(np.arange(len(pixels)), len(batches)):
        records = np.concatenate([labels[rows], pixels[rows]], axis=1).tobytes()
        blocks[hashlib.sha1(records, usedforsecurity=False).hexdigest()] = rows
    if blocks.keys() != {batch.sha1 for batch in batches}:
        return None
    return np.concatenate([blocks[batch.sha1] for batch in batches])
