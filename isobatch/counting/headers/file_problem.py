"""Whatever is raised while a file is read -> the problem of its sample. Pure."""

from isobatch.counting.records.media import SampleProblem
from isobatch.media.decoder_faults import fault_of


def file_problem(error: Exception, kind: str, name: str) -> SampleProblem:
    """The problem of the image, video or audio file (`kind`) of this name.

    Raises the error again where it is not the file's fault (`media.decoder_faults`).
    """
    if isinstance(error, SampleProblem):
        return SampleProblem(error.reason, f"{name}: {error.detail}")
    fault = fault_of(error)
    is_reason = fault.kind == "too_many_pixels"
    reason = fault.kind if is_reason else f"{fault.kind}_{kind}"
    return SampleProblem(reason, f"{name}: {fault.detail}")
