"""What a user sees of a run: live terminal view, TensorBoard events, pictures, summary and HTML report."""

from solrl_ray.report.grids import contact_sheet, save_pictures, write_picture
from solrl_ray.report.live import LiveView
from solrl_ray.report.page import build
from solrl_ray.report.stored import stored_progress
from solrl_ray.report.summary import Summary, read_summary, summarize, write_summary
from solrl_ray.report.tensorboard import TensorBoardWriter

__all__ = [
    "LiveView",
    "Summary",
    "TensorBoardWriter",
    "build",
    "contact_sheet",
    "read_summary",
    "save_pictures",
    "stored_progress",
    "summarize",
    "write_picture",
    "write_summary",
]
