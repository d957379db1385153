"""What would this proposer be worth there: recorded acceptance, replayed against what rounds cost on some device.

`record` needs the engine; all the rest is plain numbers, without a tensor.
"""

from specroll.simulate.predict import Prediction, predict
from specroll.simulate.replay import Outcome, replay
from specroll.simulate.roofline import DEVICES, SIZES, Roofline
from specroll.simulate.surface import MeasuredSurface, Surface
from specroll.simulate.trace import Response, Round, Trace

__all__ = [
    "DEVICES",
    "SIZES",
    "MeasuredSurface",
    "Outcome",
    "Prediction",
    "Response",
    "Roofline",
    "Round",
    "Surface",
    "Trace",
    "predict",
    "replay",
]
