"""In a test's webui: the part of mediapipe's face detector that ADetailer calls; it finds one face, in the middle."""

import contextlib
import importlib
import sys
from types import ModuleType, SimpleNamespace

with contextlib.suppress(ImportError):
    importlib.import_module("controlnet_aux")  # first: ControlNet's package needs more of a mediapipe that it finds


class FaceDetection(contextlib.nullcontext):
    def __init__(self, **options):
        super().__init__(self)

    def process(self, image):
        box = SimpleNamespace(xmin=0.25, ymin=0.25, width=0.5, height=0.5)
        face = SimpleNamespace(location_data=SimpleNamespace(relative_bounding_box=box), score=[0.9])
        return SimpleNamespace(detections=[face])


module = sys.modules["mediapipe"] = ModuleType("mediapipe")
drawing = SimpleNamespace(draw_detection=lambda image, face: None)
module.solutions = SimpleNamespace(face_detection=SimpleNamespace(FaceDetection=FaceDetection), drawing_utils=drawing)
