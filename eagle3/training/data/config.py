"""What to train on: sources of rows, and how their tokens fill the rows of a batch."""

from dataclasses import dataclass, field

from eagle3.config import ConfigError

FORMATS = ("auto", "messages", "conversations", "prompt", "text", "tokens")
PACKINGS = ("window", "pack", "pad")
SPLITS = ("train", "heldout")  # of the standard library


@dataclass(frozen=True)
class SourceConfig:
    """Where rows come from: files, the hub or, with neither, the standard library's source."""

    files: str = ""  # path or glob of .jsonl, .parquet, .txt; .jsonl and .txt also with .gz
    hub: str = ""  # name of a dataset on the Hugging Face hub
    subset: str = ""  # configuration of the hub dataset, if it has several
    split: str = ""  # hub: train unless given; standard library: train (default) or heldout
    revision: str = ""  # hub: branch, tag or commit; the cache does not see a branch move
    streaming: bool = False  # hub: read rows as they come, without downloading the whole first
    max_rows: int = 0  # rows to read from the beginning; 0: all
    # messages, conversations, prompt (and response), text, or tokens: ids, of which those from
    # number prompt_tokens on are trained on. auto: the first of these that a row has a field of.
    format: str = "auto"
    weight: float = 1.0  # share of the rows of batches, relative to the other sources

    def __post_init__(self) -> None:
        """Reject contradictions.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        if self.files and self.hub:
            raise ConfigError("source has files and hub; give one, and make two sources for both")
        if self.format not in FORMATS:
            raise ConfigError(f"source.format is {self.format!r}, it must be one of {FORMATS}")
        if self.max_rows < 0:
            raise ConfigError(f"source.max_rows is {self.max_rows}, it must be at least 0 (all)")
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"source.weight is {self.weight}, it must be above 0 and finite")
        if not self.hub:
            for name in ("subset", "revision", "streaming"):
                if getattr(self, name):
                    raise ConfigError(f"source.{name} is set, which needs a source.hub to apply to")
        if self.files and self.split:
            raise ConfigError("source.split is set, but files have no splits: name other files")
        if self.kind == "stdlib":
            if self.split not in ("", *SPLITS):
                raise ConfigError(f"source.split is {self.split!r}, it must be one of {SPLITS}")
            if self.format not in ("auto", "text"):
                raise ConfigError(f"source.format is {self.format!r}, the standard library is text")

    @property
    def kind(self) -> str:
        """Return `files`, `hub` or `stdlib`."""
        return "files" if self.files else "hub" if self.hub else "stdlib"


@dataclass(frozen=True)
class DataConfig:
    """Sources, and how their documents fill rows."""

    # By a name of your choice, which messages use; none: the standard library's source.
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    batch_size: int = 8  # rows a step
    length: int = 512  # tokens a row
    # window: documents one after the other, cut every `length` tokens. pack: several whole
    # documents a row. pad: one document a row.
    packing: str = "window"
    truncate: bool = False  # pack and pad: cut what is longer than a row, instead of dropping it
    # Of each source's rows of batches: so many, drawn at random, are trained on. Vocabularies and
    # regenerate see all.
    share: float = 1.0
    seed: int = 0  # of the order, and of what is drawn
    cache: str = "runs/cache"  # directory for tokenised sources
    feature_cache: str = ""  # directory for what the target says about them; empty: runs each time
    feature_cache_gb: float = 20.0  # most that it may take, in 10^9 bytes
    prefetch: int = 2  # batches that are made ahead

    def __post_init__(self) -> None:
        """Reject values that no run can use.

        Raises:
          ConfigError: naming the field and what it may be.
        """
        for name in ("batch_size", "length", "prefetch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data.{name} is {getattr(self, name)}, it must be at least 1")
        if self.packing not in PACKINGS:
            raise ConfigError(f"data.packing is {self.packing!r}, it must be one of {PACKINGS}")
        if self.truncate and self.packing == "window":
            raise ConfigError(
                "data.truncate has no effect with packing window: nothing is too long"
            )
        if not 0 < self.share <= 1:
            raise ConfigError(f"data.share is {self.share}, it must be above 0 and at most 1 (all)")
        if not 0 < self.feature_cache_gb < float("inf"):
            raise ConfigError(
                f"data.feature_cache_gb is {self.feature_cache_gb}, it must be above 0"
            )
        if self.seed < 0:
            raise ConfigError(f"data.seed is {self.seed}, it must be at least 0")

    @property
    def named_sources(self) -> dict[str, SourceConfig]:
        """Return the sources in the order of their names, whatever that in the file is."""
        return dict(sorted(self.sources.items())) or {"stdlib": SourceConfig()}
