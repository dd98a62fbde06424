"""The table of verbs: the function, the arguments and the help text of each command of the command line."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, NamedTuple


class Verb(NamedTuple):
    """A command of the command line: where its code is, and its help text."""

    function: str
    """Function that implements the verb, as `module:function` inside `package`."""
    arguments: str
    """Class that declares the verb's arguments and prints the function's result, as `module:class` inside the package
    `commands` of `package`."""
    help: str
    rest: Literal["", "overrides", "command"] = ""
    """Meaning of the remaining arguments, which the class is called with: empty (none are allowed), overrides of the
    run file, or a command to run."""
    package: str = "shoestring"
    """Name of the package that implements the verb; importing the table does not import that package."""

    def load(self) -> Any:
        """Import the class that declares the verb's arguments."""
        module, _, name = self.arguments.partition(":")
        return getattr(import_module(f"{self.package}.commands.{module}"), name)


# fmt: off
VERBS: dict[str, Verb] = {
    "train": Verb(
        "training.loop:train", "runs:Train",
        "Train as a run file says. Overrides: --area.technique.key VALUE, and --key VALUE for a key of [run].",
        rest="overrides",
    ),
    "check": Verb(
        "verbs.check:check", "runs:Check",
        "Print the resolved settings of a run, its features in order, its parameters and its memory; start nothing. "
        "With --model MODEL and no run: print how texts of a model begin and end, and its defaults of sampling. Code "
        "that the run file names is left out, unless you have trained with that file or vouched for it (shoestring "
        "trust).",
        rest="overrides",
    ),
    "plan": Verb(
        "verbs.plan:plan", "runs:Plan",
        "Measure the model and the links between ranks, predict the step time of each way to train it (exchanges, "
        "shards, stages, split layers, micro-batches, recomputation), try the best ones, and write a run file with the "
        "fastest. [comm.auto] lists codecs that may be chosen as well; code that the run file names needs your word "
        "first, by `train` or `shoestring trust`.",
        rest="overrides",
    ),
    "distill": Verb(
        "verbs.distill:distill", "runs:DistillDrafter",
        "Train a small model to draft for a large one, as [decode.distill] says: first a reference on all tokens, "
        "then the draft on those that are worth learning. Each stage writes to a folder of its own inside the run "
        "folder.",
        rest="overrides",
    ),
    "generate": Verb(
        "verbs.generate:generate", "models:Generate",
        "Continue a prompt with a trained model, token by token; with --chat, answer a question.",
    ),
    "chat": Verb(
        "verbs.chat:converse", "models:Talk",
        "Talk with a trained model in the terminal, by its chat template; /help lists what can be said besides "
        "questions.",
    ),
    "predict": Verb(
        "verbs.predict:predict", "models:Predict",
        "Run the model of a run on your own files, and write what it says to a table and a page.",
    ),
    "evaluate": Verb(
        "verbs.evaluate:evaluate", "models:EvaluateModel",
        "Evaluate a trained model on tasks of lm-evaluation-harness, such as hellaswag, or on tasks of your own.",
    ),
    "skip": Verb(
        "verbs.skip:skip", "models:Skip",
        "Choose the attention and feed-forward sublayers whose skipping costs least, from sample text, for "
        "`generate`.",
    ),
    "prune": Verb(
        "verbs.prune:prune", "models:PruneModel",
        "Make a trained model 2:4 sparse at once, without training, and write it to a new folder.",
    ),
    "quantize": Verb(
        "verbs.quantize:quantize", "models:QuantizeModel",
        "Round the weights of a trained model to 8 or 4 bits, without training, and write it to a new folder.",
    ),
    "probe": Verb(
        "verbs.probe:probe", "runs:Probe",
        "Measure this cluster: arithmetic and memory of each device, disks, and the links between ranks.",
    ),
    "build": Verb(
        "verbs.build:build", "runs:Build",
        "Compile the native kernels for this machine now, so that no run and no first request waits for them.",
    ),
    "compare": Verb(
        "verbs.report:compare", "runs:CompareRuns",
        "Show how runs differ in settings and results, with their curves in the same charts.",
    ),
    "report": Verb(
        "verbs.report:report", "runs:Report",
        "Rewrite the report.html of a run; the run may still be training.",
    ),
    "serve": Verb(
        "verbs.serve:serve", "models:Serve",
        "Serve a trained model over HTTP, with the interface of OpenAI's API and a page to try it in a browser.",
    ),
    "data show": Verb(
        "verbs.data:show", "data:ShowData",
        "Show what training reads of a file, a data set or a run file: the format, the first records as the model sees "
        "them with the tokens that it learns, what is cut or left out, and why.",
    ),
    "profile run": Verb(
        "verbs.profile:profile_program", "recordings:RunProfiled",
        "Run a Python program and show which of its lines take the time.",
        rest="command",
    ),
    "profile view": Verb(
        "verbs.profile:view", "recordings:ViewProfile",
        "Write a profile as one HTML page that works offline, and show its lines here.",
    ),
    "profile diff": Verb(
        "verbs.profile:diff", "recordings:DiffProfiles",
        "Compare two profiles: which lines became slower or faster; also where lines have moved in between.",
    ),
    "profile merge": Verb(
        "verbs.profile:merge", "recordings:MergeProfiles",
        "Merge profiles, such as those of several ranks, into one file that keeps the times of each.",
    ),
    "profile export": Verb(
        "verbs.profile:export", "recordings:ExportProfile",
        "Convert a profile for another tool.",
    ),
    "memory view": Verb(
        "verbs.memory:view", "recordings:ViewMemory",
        "Write a recording of memory as one HTML page that works offline, and show here its peak and what a static "
        "plan of its addresses would take.",
    ),
    "memory diff": Verb(
        "verbs.memory:diff", "recordings:DiffMemory",
        "Compare two recordings: what made the peak of the later one higher, tensor by tensor.",
    ),
    "memory export": Verb(
        "verbs.memory:export", "recordings:ExportMemory",
        "Convert a recording of memory for torch's memory_viz page (pytorch.org/memory_viz).",
    ),
    "memory host": Verb(
        "verbs.memory:list_leases", "recordings:LeasedMemory",
        "Show which processes hold the memory of this host, among those that have agreed on it with [memory.broker].",
    ),
    "tune run": Verb(
        "verbs.tune:tune", "tune:StartStudy",
        "Start or continue a study, and work for it until it is over.",
    ),
    "tune join": Verb(
        "verbs.tune:join", "tune:JoinStudy",
        "Work for a study that another machine has started.",
    ),
    "tune best": Verb(
        "verbs.tune:write_best", "tune:WriteBest",
        "Write the run file of the best trial so far.",
    ),
    "tune page": Verb(
        "verbs.tune:compare_studies", "tune:WritePage",
        "Write the page of a study, beside others that had the same objective.",
    ),
    "lab up": Verb(
        "testing.netlab.by_hand:up", "lab:StartLab",
        "Start virtual hosts and return.",
    ),
    "lab run": Verb(
        "testing.netlab.by_hand:run", "lab:RunInLab",
        "Run the command after -- on the virtual hosts.",
        rest="command",
    ),
    "lab down": Verb(
        "testing.netlab.by_hand:down", "lab:EndLab",
        "End the virtual hosts.",
    ),
    "hub login": Verb(
        "client.logins:log_in", "programs:LogIn",
        "Remember the address of a hub and a token for one of its projects, which a page of the hub has shown.",
        package="shoestring_hub",
    ),
    "hub push": Verb(
        "client.push:push", "programs:Push",
        "Send the folder of a run to the hub; continues where it broke off, and takes the files of a running run as "
        "they are now.",
        package="shoestring_hub",
    ),
    "hub pull": Verb(
        "client.pull:pull", "programs:Pull",
        "Bring the folder of a run from the hub; training resumes from it if its checkpoints were pushed.",
        package="shoestring_hub",
    ),
    "hub clip": Verb(
        "client.clip:send_clip", "programs:SendClip",
        "Send a video file to the hub, for a run or a project; continues where it broke off.",
        package="shoestring_hub",
    ),
    "hub serve": Verb(
        "server.serve:serve", "administration:ServeHub",
        "Start the hub: a server for the runs and clips of a lab, with SQLite and a folder, or with PostgreSQL.",
        package="shoestring_hub",
    ),
    "hub person": Verb(
        "server.administration:add_person", "administration:AddPerson",
        "Make a person, the first one included, or a link by which a person sets a new password.",
        package="shoestring_hub",
    ),
    "hub deactivate": Verb(
        "server.administration:deactivate", "administration:Deactivate",
        "End all access of a person at once; the runs of the person stay.",
        package="shoestring_hub",
    ),
    "hub clean": Verb(
        "server.administration:clean", "administration:Clean",
        "Remove deleted runs and clips whose grace period is over, and bytes to which nothing refers.",
        package="shoestring_hub",
    ),
    "hub figures": Verb(
        "server.administration:figures", "administration:HubFigures",
        "Print how many clips wait, are converted, are ready and have failed, in the text format of Prometheus.",
        package="shoestring_hub",
    ),
    "hub backup": Verb(
        "server.backup:back_up", "administration:BackUp",
        "Copy a hub to a folder while it serves: its database, its key, and the chunks and clips that the copy lacks.",
        package="shoestring_hub",
    ),
    "hub restore": Verb(
        "server.backup:restore", "administration:Restore",
        "Make a new hub from a backup, and check every chunk and clip.",
        package="shoestring_hub",
    ),
    "hub check": Verb(
        "server.administration:check", "administration:CheckHub",
        "Check the settings of a hub for deployment, as Django's `check --deploy` does.",
        package="shoestring_hub",
    ),
    "checkpoint ls": Verb(
        "verbs.archive:list_checkpoints", "checkpoint:ListCheckpoints",
        "List the checkpoints of a run, on disk and in this host's shared memory.",
    ),
    "checkpoint verify": Verb(
        "verbs.archive:verify", "checkpoint:VerifyCheckpoints",
        "Read every checkpoint and say what is damaged; the exit code is 1 if anything is.",
    ),
    "checkpoint show": Verb(
        "verbs.archive:show", "checkpoint:ShowCheckpoint",
        "Show the content of a checkpoint: its states, and its tensors with types, shapes and shards.",
    ),
    "checkpoint explain": Verb(
        "verbs.archive:explain", "checkpoint:ExplainResume",
        'Say what `run.resume = "auto"` would resume from, why, and why from nothing newer. Reads that checkpoint, and '
        "writes nothing.",
    ),
    "checkpoint export": Verb(
        "verbs.interchange:export", "checkpoint:ExportCheckpoint",
        "Convert a checkpoint for other programs.",
    ),
    "checkpoint import": Verb(
        "verbs.interchange:import_checkpoint", "checkpoint:ImportCheckpoint",
        "Convert what another program wrote to a checkpoint, from which a run resumes on any number of ranks.",
    ),
    "checkpoint trim": Verb(
        "verbs.trim:trim", "checkpoint:TrimCheckpoints",
        "Delete older checkpoints, and those that the run went back from, once those that are kept have been "
        "verified.",
    ),
    "recipes list": Verb(
        "verbs.recipes:list_recipes", "runs:ListRecipes",
        "List the recipes that are installed: what each is for, which areas it uses, and how long it takes.",
    ),
    "recipes copy": Verb(
        "verbs.recipes:copy", "runs:CopyRecipe",
        "Copy a recipe with its code to a new folder, as a project of your own to change.",
    ),
    "keys": Verb(
        "verbs.keys:search", "runs:SearchKeys",
        "Search the keys of run files by name and help text: `shoestring keys lr`. `shoestring train finetune --help` "
        "lists those of a recipe.",
    ),
    "trust": Verb(
        "verbs.trust:vouch", "runs:TrustPlaces",
        "Trust somebody else's folder or run file: the code that it names may be run from now on, until it or that "
        "code changes. What your own runs write is trusted already.",
    ),
}
# fmt: on
"""Maps the name of each verb to its function, the class of its arguments, and its help text."""
GROUPS = {
    "data": "Look at training data.",
    "profile": "Profile any Python program by its own lines: `shoestring profile script.py [its arguments]`.",
    "memory": "Show what the memory of a run was of, as [memory.tracing] or `memory.traced` has recorded it, and who "
    "holds the memory of this host.",
    "tune": "Search for the settings of a run, on workers that may join, leave or vanish at any time: `shoestring tune "
    "tune.toml`.",
    "recipes": "Ready tasks to run, to copy and to change: `shoestring train NAME` runs one.",
    "lab": "Virtual hosts with slow links on this machine, to try several hosts by hand; needs root.",
    "hub": "Keep the runs and clips of a lab on a server of one's own: push and pull runs, send clips, and serve them.",
    "checkpoint": "List, verify, show, explain, export, import and delete the checkpoints of a run.",
}
"""Maps the first word of verbs with two words to the help text of the group."""
RUN_IS_IMPLIED = ("profile", "tune")
"""Groups whose verb `run` is meant if no verb is given: `shoestring tune FILE` is `shoestring tune run FILE`."""
ALONE = {"recipes": "list"}
"""Maps a group to the verb that is meant if nothing follows the group."""
RENAMED = {"checkpoint prune": "checkpoint trim"}
"""Maps the former name of a verb to its present name; former names still work."""
RENAMED_FLAGS = {"generate": {"--tokens": "--max-tokens"}}
"""For each verb with renamed flags, maps the former names of the flags to the present names. Former names still work.
"""
