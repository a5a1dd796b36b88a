"""The table of all checks of a submission, by their stable codes, and `Finding`.

`checks.md` in this folder is this table as a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

# refuse: it cannot be judged. deduct: it costs a part of the grade. flag: a person has to look, and the grade stays as
# it is. note: for the record. off: not told.
SEVERITIES = ("refuse", "deduct", "flag", "note", "off")


class Check(NamedTuple):
    """severity: as long as no config changes it. most: the best grade with it, if that is what a deduction means; ""
    for a fault of format: all of them together cost one step."""

    severity: str
    most: str
    what: str
    advice: str


AGAIN = "create the zip anew with prepare_submit.py and hand that in"
RERUN = "run the course's command again, without changing its output"
BY_HAND = "compare by hand; equal numbers alone are no proof"
CHECKS = {
    "E001-zip": Check("refuse", "", "not a zip archive, a damaged one, or another archive is all that it holds", AGAIN),
    "E002-size": Check("deduct", "", "the zip is larger than the limit", "leave out checkpoints and data sets"),
    "E003-unpacked": Check("refuse", "", "too large to be read", "leave out checkpoints and data sets"),
    "E004-entries": Check("refuse", "", "entries that tools unpack differently or must not unpack: links, absolute "
                          "names, two entries for one name, stray bytes", AGAIN),
    "E005-damaged": Check("refuse", "", "entries whose data are damaged", AGAIN),
    "E006-backslash": Check("note", "", "names with backslashes between folders; they were read as slashes", AGAIN),
    "E010-folder": Check("deduct", "", "the files do not lie directly in one top folder, named by the ID", AGAIN),
    "E011-id-case": Check("note", "", "the ID is in upper case, or in another case than the roster's or the file "
                          "name's", ""),
    "E012-missing": Check("deduct", "B", "a required code file is missing", "hand it in"),
    "E013-no-output": Check("deduct", "B+", "a required output file or text is missing: nothing confirms that result",
                            "run the course's command and hand its output in"),
    "E014-lines": Check("deduct", "A-", "an output file has more or fewer lines than the data", RERUN),
    "E015-format": Check("deduct", "A-", "a line of an output file has not the form of label and sentence", RERUN),
    "E016-label": Check("deduct", "A-", "a label outside the label mapping", RERUN),
    "E017-sentence": Check("deduct", "A-", "a line of an output file has another sentence than the data", RERUN),
    "E018-misnamed": Check("deduct", "A-", "an output file of another kind or of another data set", "rename the files"),
    "E019-empty": Check("deduct", "B+", "a required file is empty or blank", "run the command again"),
    "E020-text": Check("deduct", "A-", "an output file or a generated text is not UTF-8 text, or too large", RERUN),
    "E021-advanced": Check("note", "", "of a data set's two advanced outputs one is missing", "hand in dev and test"),
    "E022-foreign": Check("deduct", "", "checkpoints, environments or .git in the zip", "leave them out"),
    "E023-clutter": Check("note", "", "caches or archives in the zip", "leave them out"),
    "E024-unlisted": Check("note", "", "files of the course's list are absent that its checker does not demand", ""),
    "E025-optional": Check("note", "", "optional files are absent", ""),
    "E026-models": Check("deduct", "B+", "trained models that the edition asks for are missing", "hand them in"),
    "E027-edition": Check("flag", "", "files that only other editions of the course ask for",
                          "whose year is this? see the config's edition"),
    "E030-needs": Check("deduct", "", "the required files need modules or files that are not in the zip", AGAIN),
    "E031-needs-others": Check("note", "", "other scripts need modules or files that are not in the zip", ""),
    "E032-library": Check("deduct", "", "the required files import a library that setup.sh of the course does not "
                          "install", "do without it; for advanced methods ask first"),
    "E033-library-others": Check("note", "", "other scripts import such a library", ""),
    "E034-python": Check("deduct", "B", "a required file, or one that it imports, is not Python", "mend the line"),
    "E035-python-others": Check("note", "", "another script is not Python", ""),
    "E036-unread": Check("flag", "", "a module too large to look for its imports", "read it"),
    "E037-shadow": Check("flag", "", "a file that Python imports in place of a library, of one of its own modules or "
                         "of another file NAME.py",
                         "read it; if it is innocent, the student renames it"),
    "E038-checker": Check("flag", "", "a grading script or its numbers differ from the course's and from ours",
                          "compare; the grade never rests on the student's copy"),
    "E040-accuracy": Check("deduct", "A-", "an accuracy further below the reference than the grade A allows",
                           "look for the cause with sanity_check.py --parts"),
    "E041-high": Check("note", "", "an accuracy further above the reference than that", ""),
    "E042-gold": Check("flag", "", "an accuracy that no run reaches: copied gold labels?", "run the student's command"),
    "E043-constant": Check("flag", "", "every line has the same label", "look for the cause"),
    "E044-prompt": Check("note", "", "another prompt than the course's after the sentence", ""),
    "E045-no-data": Check("flag", "", "no data set to compare the outputs with", "put it into the folder gold"),
    "E046-zero-shot": Check("note", "", "zero-shot labels other than the published ones of stories42M.pt",
                            "honest code has them, too, on other processors or with other prompts"),
    "E047-advanced-equal": Check("flag", "", "all advanced outputs have the labels of base outputs",
                                 "ask what the method changed"),
    "E048-same-labels": Check("flag", "", "several students have the same fine-tuned labels on SST", BY_HAND),
    "E049-same-cfimdb": Check("note", "", "several students have the same fine-tuned labels on CFIMDB",
                              "the course's seed gives them"),
    "E050-no-prompt": Check("flag", "", "a generated text does not begin with the prompt", "read the text"),
    "E053-repetitive": Check("flag", "", "the text at temperature 0 repeats itself", "read the text"),
    "E054-short": Check("flag", "", "a generated text is too short to be judged", "read the text"),
    "E055-words": Check("flag", "", "few words of a generated text are known", "read the text"),
    "E056-temperatures": Check("flag", "", "the texts at temperatures 0 and 1 are equal", "look at generate"),
    "E057-code-page": Check("note", "", "a generated text in UTF-16 or in a code page of Windows; it was decoded", ""),
    "E058-causal": Check("flag", "", "the text of a model with a causal mask, which this edition has not",
                         "look for the mask"),
    "E060-report-name": Check("flag", "", "a report under another name", "rename it"),
    "E061-report-pdf": Check("flag", "", "the report is no PDF", "export it as PDF"),
    "E062-report-pages": Check("flag", "", "the report has too many pages", "shorten it"),
    "E063-no-report": Check("flag", "", "advanced outputs without a report", "describe the method"),
    "E064-a-plus": Check("note", "", "advanced outputs and a report: A+ may be due", "read the report; give A+ in "
                         "overrides.csv"),
    "E065-uncounted": Check("note", "", "the pages of the report were not counted", "count them"),
    "E070-late": Check("note", "", "Canvas calls the submission late", "decide; penalties.late_steps deducts"),
    "E071-older": Check("note", "", "older uploads of the same student, which do not count", ""),
    "E072-twice": Check("refuse", "", "several uploads claim one ID, and none is known to be the newest",
                        "leave the right one in the folder"),
    "E073-unmatched": Check("refuse", "", "no student is known for this upload", "rename it, or mend the roster"),
    "E074-absent": Check("refuse", "", "a student of the roster without an upload", "nothing, or ask"),
    "E079-failed": Check("refuse", "", "the checker itself failed on it", "grade it by hand; report the defect"),
    "E080-part": Check("deduct", "B", "a part of the student's code is wrong", "run sanity_check.py --parts"),
    "E081-import": Check("deduct", "B", "a module cannot be imported", "start Python in the folder and import it"),
    "E082-addition": Check("deduct", "A-", "best_model does not solve the additions", "train it longer, or widen it"),
    "E083-model": Check("flag", "", "a trained model cannot be read as plain tensors, or has another structure",
                        "never load it outside of a box; ask how it was saved"),
    "E084-capacity": Check("deduct", "A", "a model was trained with more operations than allowed",
                           "train with the course's --capacity"),
    "E085-ablations": Check("flag", "", "best_model is not the smallest that solves the additions, or too few models "
                            "miss one", "compare with experiment_summary.json; A+ needs both"),
    "E086-claims": Check("flag", "", "a JSON file beside a model says something else than the model shows", BY_HAND),
}  # fmt: skip


# The student's own check (`prepare_submit.py`, Gradescope) differs in these: the zip can still be made anew, accuracies
# are graded by the grader's config, and gold labels are the grader's.
OWN_CHECK = {"E006-backslash": "deduct", "E040-accuracy": "flag", "E045-no-data": "note"}


class Finding(str):
    """The sentence of a finding. code: of its check; "" for a note on how a zip was made. line: from 1; 0: none.

    severity: of `SEVERITIES`; "" takes the table's.
    """

    code: str
    file: str
    line: int
    expected: str
    got: str
    severity: str

    def __new__(
        cls, text: str, code: str = "", file: str = "", line: int = 0, expected: object = "", got: object = "",
        severity: str = "",
    ) -> Finding:  # fmt: skip
        self = super().__new__(cls, text)
        self.code, self.file, self.line, self.expected, self.got = code, file, line, str(expected), str(got)
        self.severity = severity or (CHECKS[code].severity if code else "note")
        return self

    @property
    def check(self) -> Check:
        return CHECKS[self.code]

    def with_severity(self, severities: Mapping[str, str]) -> Finding:
        """The same with another severity, if its code is among these."""
        severity = severities.get(self.code, self.severity)
        return Finding(self, self.code, self.file, self.line, self.expected, self.got, severity)

    def told(self) -> dict[str, str | int]:
        """Plain values, of which `Finding(**values)` makes it again."""
        return {"text": str(self), **vars(self)}


def with_severities(findings: Iterable[Finding], severities: Mapping[str, str]) -> list[Finding]:
    """The findings, the severest first. severities: by code, where they differ from the table's."""
    found = [one.with_severity(severities) for one in findings]
    return sorted((one for one in found if one.severity != "off"), key=rank)


def rank(finding: Finding) -> tuple:
    """What findings are sorted by."""
    return SEVERITIES.index(finding.severity), finding.code, finding.file, finding.line, str(finding)
