"""CIFAR-10 and CIFAR-100 as open-set tasks, with the splits of the Fix-A-Step paper (Huang et al., 2023)."""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import datasets
import huggingface_hub
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq

from hf_fixastep.hub.client import online


HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
SIDE = 32
PIXELS = 3 * SIDE * SIDE


class Rows(NamedTuple):
    """Images as the official files hold them, and their class numbers."""

    pixels: np.ndarray  # uint8 [N, 3072], a red, a green and a blue plane
    labels: np.ndarray  # [N]


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
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
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

PROCEDURE = """
The splits are those of Huang et al. (2023). The 50,000 training images, in the order of the official files, are
permuted by numpy's `RandomState(seed)`. Of each class, the first {validation} are for validation, the next
`labels_per_class` are labeled, and the rest is unlabeled. So labeled, unlabeled and validation images are disjoint,
the labeled and validation images do not depend on zeta, and a smaller labeled set is part of every larger one.
Labeled, validation and test images are of the labeled classes alone; the latter are the official test images.

Unlabeled images carry neither a label nor their file name, and their order is shuffled once more, so that it tells
nothing about the class. `oracle=True` drops the foreign ones among them ("perfect filtering").

Images are 32x32 RGB, the original pixels as PNG. Whatever the source (the official archive, its extracted folder, or
the parquet files of the Hub, where CIFAR-10 is in another order), the rows are checked by checksum and put into the
official order before they are split.
"""

CITATION = """
@techreport{krizhevsky2009learning,
  title = {Learning Multiple Layers of Features from Tiny Images},
  author = {Alex Krizhevsky},
  institution = {University of Toronto},
  year = {2009}
}
@inproceedings{huang2023fixastep,
  title = {Fix-A-Step: Semi-supervised Learning from Uncurated Unlabeled Data},
  author = {Zhe Huang and Mary-Joy Sidhom and Benjamin S. Wessler and Michael C. Hughes},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year = {2023}
}
"""


@dataclass
class CifarConfig(datasets.BuilderConfig):
    """One choice of unlabeled classes.

    Args:
        labels_per_class: labeled images of each labeled class.
        seed: seed of the split.
        oracle: drop the unlabeled images whose true class is not a labeled one.
        foreign: add the test images of foreign classes, as splits seen_foreign (classes that the unlabeled
            images show) and unseen_foreign, those of the two that there are.
    """

    labels_per_class: int = 400
    seed: int = 0
    oracle: bool = False
    foreign: bool = False


class CifarOpenSet(datasets.GeneratorBasedBuilder):
    """What the two tasks share; a subclass states the classes."""

    BUILDER_CONFIG_CLASS = CifarConfig

    cifar: ClassVar[Cifar]
    labeled_classes: ClassVar[range]
    unlabeled_classes: ClassVar[dict[str, Sequence[int]]]  # by name of the config
    validation_per_class: ClassVar[int]
    about: ClassVar[str]

    shareable = True
    terms = (
        "The authors state no licence (the Hub lists it as unknown) and ask users to cite Krizhevsky (2009); the set "
        "is freely downloadable and widely passed on."
    )

    def _info(self) -> datasets.DatasetInfo:
        names = [self.cifar.class_names[label] for label in self.labeled_classes]
        procedure = PROCEDURE.format(validation=self.validation_per_class)
        return datasets.DatasetInfo(
            description=inspect.cleandoc(self.about) + "\n\n" + procedure.strip(),
            homepage=HOMEPAGE,
            license="unknown",
            citation=CITATION.strip(),
            features=datasets.Features(
                {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
            ),
        )

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        config = self.config
        self._check_settings()  # before the files are read, which takes a while
        train, test = read_cifar(self.cifar, config.data_dir)
        known = self.labeled_classes
        unlabeled = [c for c in self.unlabeled_classes[config.name] if c in known or not config.oracle]
        parts = split_rows(
            train.labels, known, unlabeled, self.validation_per_class, config.labels_per_class, config.seed
        )
        rows = {
            name: Rows(train.pixels[part], train.labels[part] - known.start) for name, part in parts.items()
        }
        seen = set(unlabeled) - set(known)
        tested = {
            "test": known,
            "seen_foreign": seen,
            "unseen_foreign": set(test.labels.tolist()) - seen - set(known),
        }
        for name, classes in tested.items() if config.foreign else [("test", known)]:
            part = np.flatnonzero(np.isin(test.labels, list(classes)))
            rows[name] = Rows(test.pixels[part], test.labels[part] - known.start)
        # All splits of a builder share their columns: unlabeled rows are stored with -1, and the registry
        # drops it.
        for name in rows.keys() - {"labeled", "validation", "test"}:
            rows[name].labels[:] = -1
        filled = {name: part for name, part in rows.items() if len(part.labels)}
        return [
            datasets.SplitGenerator(name=name, gen_kwargs=part._asdict()) for name, part in filled.items()
        ]

    def _check_settings(self) -> None:
        config = self.config
        per_class = self.cifar.train_size // len(self.cifar.class_names)
        largest = per_class - self.validation_per_class - 1  # one image of every class stays unlabeled
        if not 1 <= config.labels_per_class <= largest:
            raise ValueError(
                f"labels_per_class is {config.labels_per_class}, but the images of {self.cifar.title} suffice for 1 "
                f"to {largest}: choose a number in that range."
            )
        if config.oracle and not set(self.unlabeled_classes[config.name]) & set(self.labeled_classes):
            raise ValueError(
                f"oracle=True drops every unlabeled image of {config.name}, which leaves labeled-only training: use "
                "loss=supervised, without the oracle."
            )

    def _generate_examples(
        self, pixels: np.ndarray, labels: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for row, (planes, label) in enumerate(zip(pixels, labels, strict=True)):
            # No path: the original file names tell the class.
            yield row, {"image": {"bytes": to_png(planes), "path": None}, "label": int(label)}


class Cifar10SixAnimal(CifarOpenSet):
    """CIFAR-10: six labeled animals; unlabeled images of four classes, of which zeta percent are vehicles."""

    BUILDER_CONFIGS = [CifarConfig(f"zeta{zeta}", datasets.Version("1.0.0")) for zeta in (0, 25, 50, 75, 100)]
    DEFAULT_CONFIG_NAME = "zeta50"

    cifar = CIFAR10
    labeled_classes = range(2, 8)
    unlabeled_classes = {
        "zeta0": (4, 5, 6, 7),
        "zeta25": (0, 5, 6, 7),
        "zeta50": (0, 1, 6, 7),
        "zeta75": (0, 1, 8, 7),
        "zeta100": (0, 1, 8, 9),
    }
    validation_per_class = 500
    about = """
        CIFAR-10 as an open-set semi-supervised task: the six animals bird, cat, deer, dog, frog and horse are labeled
        (0 to 5); the unlabeled images come from four classes, and zeta percent of them are foreign, i.e. vehicles.

        | config | unlabeled classes |
        | --- | --- |
        | zeta0 | deer, dog, frog, horse |
        | zeta25 | airplane, dog, frog, horse |
        | zeta50 | airplane, automobile, frog, horse |
        | zeta75 | airplane, automobile, ship, horse |
        | zeta100 | airplane, automobile, ship, truck |

        With n labels per class there are 6n labeled and 4(4,500 - n) unlabeled images; Huang et al. (2023) use
        n = 400 and 50, and seeds 0 to 4.
        """


class Cifar100FiftyClass(CifarOpenSet):
    """CIFAR-100: fifty labeled classes; unlabeled images of fifty classes, of which zeta percent are foreign."""

    BUILDER_CONFIGS = [
        CifarConfig(f"zeta{zeta}", datasets.Version("1.0.0"), labels_per_class=100) for zeta in (50, 100)
    ]
    DEFAULT_CONFIG_NAME = "zeta50"

    cifar = CIFAR100
    labeled_classes = range(50)
    unlabeled_classes = {"zeta50": range(25, 75), "zeta100": range(50, 100)}
    validation_per_class = 50
    about = """
        CIFAR-100 as an open-set semi-supervised task: the classes 0 to 49 (fine labels, in alphabetical order) are
        labeled; the unlabeled images come from fifty classes, and zeta percent of these are foreign.

        | config | unlabeled classes |
        | --- | --- |
        | zeta50 | 25 (couch) to 74 (shrew) |
        | zeta100 | 50 (mouse) to 99 (worm) |

        With n labels per class there are 50n labeled and 50(450 - n) unlabeled images; Huang et al. (2023) use
        n = 100 and seed 0.
        """


def split_rows(
    labels: np.ndarray,
    labeled_classes: Iterable[int],
    unlabeled_classes: Iterable[int],
    validation_per_class: int,
    labels_per_class: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """Rows of every split but the test split, in shuffled order."""
    random = np.random.RandomState(seed)
    order = random.permutation(len(labels))
    bounds = [validation_per_class, validation_per_class + labels_per_class]
    # Per class, the places in the permutation that go to each part.
    places = {
        label: np.split(np.flatnonzero(labels[order] == label), bounds)
        for label in np.unique(labels).tolist()
    }
    validation = np.concatenate([places[label][0] for label in labeled_classes])
    labeled = np.concatenate([places[label][1] for label in labeled_classes])
    unlabeled = np.concatenate([places[label][2] for label in unlabeled_classes])
    return {
        "labeled": order[np.sort(labeled)],
        # Shuffled again: a class that fills its other splits early comes early here, which would tell the
        # label.
        "unlabeled": random.permutation(order[np.sort(unlabeled)]),
        "validation": order[np.sort(validation)],
    }


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
            f"{path} has the MD5 {found}, but the official file has {expected}: it is damaged, incomplete or not the "
            f"original; download it again from {HOMEPAGE}."
        )


class ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and numpy arrays; whatever else a pickle names is not even looked up."""

    ALLOWED = {("numpy", "dtype"), ("numpy", "ndarray"), ("numpy._core.multiarray", "_reconstruct")}

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.")  # as it was called when the files were made
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(
                f"The pickle asks for {module}.{name}, but a CIFAR batch holds only plain values and numpy arrays: do "
                "not use this file."
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
            f"The parquet files of {split} in {folder} hold {found} rows, but {cifar.title} has {size}: download all "
            f"parquet files of {cifar.hub}."
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
            f"The parquet files of {split} in {folder} hold other images or labels than {cifar.title}, or not batch "
            f"by batch, so that the official order is unknown: download the parquet files of {cifar.hub}."
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
            f"{file} has the columns {', '.join(schema.names)}, but {cifar.hub} has encoded images in img and numbers "
            f"in {' and '.join(cifar.label_columns)}: put its own parquet files there."
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
