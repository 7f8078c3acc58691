"""In a test's webui: mediapipe's face detector as far as ADetailer asks for it; it finds one, in the middle."""

import contextlib
import importlib
import sys
import types

with contextlib.suppress(ImportError):
    importlib.import_module("controlnet_aux")  # ControlNet's, which at import takes more of a mediapipe that it finds


class FaceDetection(contextlib.nullcontext):
    def __init__(self, **options):
        super().__init__(self)

    def process(self, image):
        box = types.SimpleNamespace(xmin=0.25, ymin=0.25, width=0.5, height=0.5)
        face = types.SimpleNamespace(location_data=types.SimpleNamespace(relative_bounding_box=box), score=[0.9])
        return types.SimpleNamespace(detections=[face])


solutions = types.SimpleNamespace(
    face_detection=types.SimpleNamespace(FaceDetection=FaceDetection),
    drawing_utils=types.SimpleNamespace(draw_detection=lambda image, face: None),
)
sys.modules["mediapipe"] = types.ModuleType("mediapipe")
sys.modules["mediapipe"].solutions = solutions
