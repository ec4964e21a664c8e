"""What this machine offers for training, what is wrong with it, and the way out of each fault.

    report = examine(bandwidth=True)
    print(as_text(report))

Every part is bounded in time; a part that cannot be measured says so instead of ending the report.
"""

from __future__ import annotations

from trilithon.doctor.examine import Report, examine
from trilithon.doctor.findings import Finding, judge
from trilithon.doctor.report import as_json, as_text

__all__ = ["Finding", "Report", "as_json", "as_text", "examine", "judge"]
