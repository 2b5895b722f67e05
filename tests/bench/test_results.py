"""bench/results/ has the file behind each figure of the pages, and no other."""

from __future__ import annotations

import re

from tests.test_documents import DOCUMENTS, ROOT

NAMED = re.compile(r"bench/results/([\w.+-]*\w)")


def test_every_file_of_results_is_named_by_a_page_and_every_named_file_exists() -> None:
    named = {name for page in DOCUMENTS for name in NAMED.findall(page.read_text())}
    assert named == {path.name for path in (ROOT / "bench" / "results").iterdir()}
