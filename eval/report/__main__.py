"""Put the stored results into docs/results.md, between its two marks.

    python -m eval.report
"""

from eval.report.results import PAGE, insert, results

if __name__ == "__main__":
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), results()), encoding="utf-8")
