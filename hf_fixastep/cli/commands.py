"""The commands: where each is, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A sub-command.

    Args:
        module: whose `main` runs it; imported only then.
        summary: one line.
        usage: what may be given after its name.
        example: a command that can be copied.
        more: a sentence at the end of its help.
        own_parser: it has a parser of argparse, which prints its help.
    """

    module: str
    summary: str
    usage: str
    example: str
    more: str = ""
    own_parser: bool = False


GROUPS = {
    "One run": {
        "fit": Command(
            "cli.fit",
            "Get the best model from a few labels, a pile and a network.",
            "--labeled DIR --unlabeled DIR --output_dir OUT [...]",
            "fixastep fit --labeled photos --unlabeled pile --output_dir out",
            "It embeds all images once with a pretrained network, fits a probe, trains heads with the pile, "
            "fine-tunes if the time allows, and says whether the pile helped. What is saved is the best on "
            "held-out images. A fit that was killed goes on where it was.",
        ),
        "doctor": Command(
            "data.doctor",
            "Look at folders of images before training on them.",
            "--labeled DIR --unlabeled DIR [--key value ...]",
            "fixastep doctor --labeled photos/labeled --unlabeled photos/pile",
            own_parser=True,
        ),
        "train": Command(
            "cli.train",
            "Train from a few labels and a pile of unlabeled images.",
            "--config RECIPE [--num_processes N] [--key value ...]",
            "fixastep train --config digits/quickstart --output_dir runs/first",
            "Every field of transformers.TrainingArguments is an option too, such as --output_dir, "
            "--max_steps, --learning_rate, --per_device_train_batch_size, --seed, --bf16 or "
            "--resume_from_checkpoint. What neither the recipe nor the command line says comes from the "
            "preset of the loss.",
        ),
        "embed": Command(
            "cli.embed",
            "Run a pretrained network once, and keep features to train on.",
            "--model NAME_OR_FOLDER --dataset NAME [--key value ...]\n"
            "       fixastep embed --model NAME_OR_FOLDER --labeled DIR --unlabeled DIR [...]",
            "fixastep embed --model google/mobilenet_v2_1.0_224 --dataset digits_open_set",
            "Images of validation and test have no views. A command that was killed goes on where it was.",
        ),
        "evaluate": Command(
            "cli.evaluate",
            "Test a finished run again, on its data or on others.",
            "RUN [RUN ...] [--key value ...]",
            "fixastep evaluate runs/quickstart --open_set true",
            "What is not given here is as in the training. Data with patients and machines, such as "
            "fetal_planes, get a report over machines, which calibrates the run for predict; several runs "
            "are compared, and those of one method averaged.",
        ),
        "predict": Command(
            "cli.predict",
            "Classify the images, or echo files, of a folder.",
            "MODEL INPUT --out answers.csv [--key value ...]",
            "fixastep predict runs/quickstart photos --out answers.csv",
            "MODEL is the folder of a run or a name on the Hub, INPUT a folder of any depth, a glob or one "
            "file.",
        ),
        "gallery": Command(
            "study.gallery",
            "Draw a run's views, and the images its gate kept or dropped.",
            "RUN [--out FOLDER]",
            "fixastep gallery runs/quickstart",
        ),
        "demo": Command(
            "cli.demo",
            "Open a page on this machine that classifies dropped images.",
            "MODEL [--key value ...]",
            "fixastep demo runs/quickstart",
            "MODEL is the folder of a run or a name on the Hub.",
        ),
        "push": Command(
            "cli.push",
            "Push a run, or a data set that may be passed on, to the Hub.",
            "RUN --hub_model_id ORG/NAME [--key value ...]\n"
            "       fixastep push --dataset NAME --hub_dataset_id ORG/NAME [--key value ...]",
            "fixastep push runs/quickstart --hub_model_id org/name --hub_license mit",
        ),
    },
    "Many runs": {
        "sweep": Command(
            "study.sweep",
            "Train a grid of runs and collect them in one table.",
            "--config SWEEP [--key value ...]",
            "fixastep sweep --config sweeps/digits --profile cpu --jobs 2",
            "Every other --key value changes that setting in all runs.",
        ),
        "compare": Command(
            "cli.compare",
            "Say whether unlabeled data and Fix-A-Step helped, and how sure.",
            "RUNS... [--key value ...]",
            "fixastep compare runs/sweep-digits",
            "RUNS are tables of results, folders of sweeps, or folders of runs.",
        ),
        "search": Command(
            "study.search",
            "Search settings of a base method on validation images.",
            "--config SEARCH [--key value ...]",
            "fixastep search --config search/digits",
            "Every other --key value changes that setting in all trials.",
        ),
    },
    "Echocardiograms": {
        "heart2heart": Command(
            "echo.evaluation",
            "Test view classifiers on three hospitals, and calibrate them.",
            "RUN [RUN RUN] --tmed2 DIR --unity DIR --camus DIR",
            "fixastep heart2heart runs/heart2heart-fixmatch-0 --tmed2 TMED2 --camus CAMUS",
        ),
        "phantom": Command(
            "echo.phantom",
            "Draw synthetic studies in the layouts of the three hospitals.",
            "--out FOLDER [--key value ...]",
            "fixastep phantom --out phantom --patients 20",
            own_parser=True,
        ),
    },
    "This machine": {
        "benchmark": Command(
            "study.benchmark",
            "Measure what a step costs, in ratios that anyone can repeat.",
            "[--key value ...]",
            "fixastep benchmark --quick --only a,b,c",
        ),
        "env": Command("cli.env", "Print versions and devices, for a bug report.", "", "fixastep env"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
