"""All experiments, in the order of the document."""

from __future__ import annotations

from ops.replay.experiments.objectives import LATE, OBJECTIVES, PARTS_OF_IT
from ops.replay.experiments.pool import CONSERVATIVENESS, FORECAST, RECOVERY, RUNWAY, STORM, WATERMARK
from ops.replay.experiments.queues import FAIRNESS, PREFIXES, STARVATION
from ops.replay.experiments.spec import Experiment

_ORDER = (
    *(RUNWAY, WATERMARK, STORM, CONSERVATIVENESS, FORECAST, RECOVERY),
    *(PREFIXES, STARVATION, FAIRNESS, OBJECTIVES, PARTS_OF_IT, LATE),
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ORDER}
