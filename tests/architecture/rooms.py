"""The import table of ARCHITECTURE.md as data: a room is a package or a top-level module of `stageline`."""

# Nouns that every room may use. They use one another only as IMPORTS says.
COMMON = {"errors", "clock", "log", "sampling", "request", "outputs", "config", "timeline", "checkpoint"}

# What a room may import besides itself and, unless it is itself one of them, COMMON.
IMPORTS: dict[str, set[str]] = {
    "errors": set(),
    "clock": set(),
    "config": {"errors"},
    "log": {"config", "errors"},
    "sampling": {"errors"},
    "outputs": set(),
    "request": {"errors", "outputs", "sampling"},
    "timeline": {"clock", "errors"},
    "checkpoint": {"config", "errors", "sampling"},
    "pipeline": set(),
    "kv": {"pipeline"},
    "cost": {"pipeline"},
    "scheduler": {"cost", "grammar", "kv", "pipeline"},
    "grammar": {"pipeline"},
    "links": set(),
    "transfer": {"links"},
    "executor": {"links", "pipeline", "transfer"},
    "cluster": {"executor", "links", "pipeline", "transfer"},
    "engine": {"cluster", "executor", "links", "grammar", "scheduler", "cost", "kv", "pipeline"},
    "server": {"engine", "cluster", "executor", "grammar", "links"},
    "doctor": {"server", "engine", "cluster", "executor", "links", "cost", "kv", "pipeline"},
    "loadgen": set(),
    "planner": {"engine", "executor", "scheduler", "kv", "cost", "pipeline", "loadgen", "links"},
    "cli": {"doctor", "planner", "engine", "server", "cluster", "links", "loadgen", "cost", "pipeline", "transfer"},
    "kernels": {"pipeline"},
    "attention": {"kernels", "pipeline"},
    "parallel": {"kernels", "pipeline"},
    "layers": {"attention", "kernels", "parallel", "pipeline"},
    "models": {"layers", "attention", "kernels", "parallel", "pipeline"},
    "weights": {"layers", "kernels", "pipeline"},
    "worker": {"models", "weights", "layers", "attention", "kernels", "parallel", "pipeline", "links", "transfer"},
    "__init__": {"engine"},
    "__main__": {"cli"},
}

# (room, module): imports upwards that are meant, with the module that is all they may see.
EXCEPTIONS = {
    ("worker", "stageline.executor.messages"),  # the words that executor and worker exchange
    ("worker", "stageline.kv.kv_size"),  # bytes per block: what was planned is what is allocated
    ("cli", "stageline"),  # its version
    ("server", "stageline"),  # the same
}

# The executor reaches the worker from inside a function only, so the engine's process never loads torch.
LAZY_IMPORTS = {("executor", "worker")}

TORCH_ROOMS = {"kernels", "parallel", "attention", "layers", "models", "weights", "worker"}
