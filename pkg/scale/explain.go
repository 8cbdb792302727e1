package scale

import (
	"cmp"
	"fmt"
	"strings"
)

// NoteCode names a reason. Codes are stable; texts are not.
type NoteCode string

// The reasons, in the order of the steps.
const (
	NoteOff         NoteCode = "off"
	NoteDisabled    NoteCode = "disabled"
	NoteOverride    NoteCode = "override"
	NoteManual      NoteCode = "manual"
	NoteStale       NoteCode = "stale"
	NoteStuck       NoteCode = "stuck"
	NoteReplace     NoteCode = "replace"
	NoteAnew        NoteCode = "anew"
	NoteBase        NoteCode = "base"
	NoteBaseOnline  NoteCode = "base_online"
	NoteTolerated   NoteCode = "tolerated"
	NoteLate        NoteCode = "late"
	NoteSurge       NoteCode = "surge"
	NoteUnused      NoteCode = "unused"
	NoteNextLate    NoteCode = "next_late"
	NotePending     NoteCode = "pending"
	NoteHold        NoteCode = "hold"
	NoteBegun       NoteCode = "begun"
	NoteWanted      NoteCode = "wanted"
	NoteFull        NoteCode = "full"
	NoteIdle        NoteCode = "idle"
	NoteRateUp      NoteCode = "rate_up"
	NoteSlowStart   NoteCode = "slow_start"
	NoteRateDown    NoteCode = "rate_down"
	NoteRunning     NoteCode = "running"
	NoteWake        NoteCode = "wake"
	NoteZeroOff     NoteCode = "zero_off"
	NoteDue         NoteCode = "due"
	NoteLastRequest NoteCode = "last_request_unknown"
	NoteZero        NoteCode = "zero"
	NoteUnhealthy   NoteCode = "unhealthy"
	NoteMin         NoteCode = "min"
	NoteFloor       NoteCode = "floor"
	NoteMax         NoteCode = "max"
	NoteBudget      NoteCode = "budget"
	NoteCap         NoteCode = "cap"
	NoteBlocked     NoteCode = "blocked"
	NoteFrozen      NoteCode = "frozen"
	NoteUpOnly      NoteCode = "up_only"
	NoteAdvise      NoteCode = "advise"
	NotePolicy      NoteCode = "policy" // Text says what
	NoteEnough      NoteCode = "enough" // of a change that nothing else explains

	// Of the algorithms of others.
	NoteRatio     NoteCode = "ratio"
	NoteTolerance NoteCode = "tolerance"
	NoteWindow    NoteCode = "window"
	NoteLoad      NoteCode = "utilization"
	NoteDeadBand  NoteCode = "dead_band"
	NoteOutOfCap  NoteCode = "out_of_capacity"
	NoteNextCycle NoteCode = "next_cycle"
)

// Note is one reason with its numbers, in the order in which its text names them. Those about a source begin with its
// age in seconds.
type Note struct {
	Code   NoteCode    `json:"code"`
	Args   [3]float64  `json:"args"`
	Source InputSource `json:"source,omitempty"` // of NoteStale and NoteFrozen
	Text   string      `json:"text,omitempty"`   // of NotePolicy
}

// InputSource is where an observation comes from that may be too old.
type InputSource string

// The sources beside the database.
const (
	SourceGateway   InputSource = "gateway"
	SourceInstances InputSource = "instances"
)

// sources has the words for each source.
var sources = map[InputSource]string{
	SourceGateway: "the report of the gateways", SourceInstances: "the report of the backends about instances",
}

func (t *decider) note(code NoteCode, a, b, c float64) {
	if t.d.Notes == nil {
		t.d.Notes = make([]Note, 0, 4)
	}
	args := [3]float64{a, b, c}
	for i := range args { // JSON has no infinity
		args[i] = within(args[i], -rowMax, rowMax)
	}
	t.d.Notes = append(t.d.Notes, Note{Code: code, Args: args})
}

// noteSource notes a reason about the oldest source.
func (t *decider) noteSource(code NoteCode, numbers ...float64) {
	t.note(code, 0, 0, 0)
	n := &t.d.Notes[len(t.d.Notes)-1]
	n.Source, n.Args[0] = t.source, t.oldest.Seconds()
	copy(n.Args[1:], numbers)
}

// texts has the sentence of each code; its verbs take the numbers of the note in their order.
var texts = map[NoteCode]string{
	NoteOff:      "scaling is off everywhere",
	NoteDisabled: "the mode is disabled: nothing is decided",
	NoteOverride: "an override asks for %.0f for another %.0f s",
	NoteManual:   "the mode is manual: stays at %.0f",
	NoteStale:    "%s is %.0f s old: nothing is counted, and the last instance stays",
	NoteStuck:    "%.0f starts are stuck: not ready after %.0f s",
	NoteReplace:  "%.0f stuck starts are begun anew, round %.0f of %.0f",
	NoteAnew:     "%.0f stuck starts are begun anew: an operator sets the number, which stays",
	NoteBase: "the load needs %.0f: with so many all along, requests would wait %.1f s in the queue, " +
		"with one fewer %.1f s",
	NoteBaseOnline: "the load needs %.0f: with so many all along, requests would wait %.1f s at the gateways, " +
		"with one fewer %.1f s",
	NoteTolerated: "the last peak needed %.0f; with %.0f at most %.0f %% of the requests are late",
	NoteLate:      "nothing is started for %.0f whose deadline comes before a start is ready",
	NoteNextLate:  "one at least: for the %.0f that are late it is too late, and others come",
	NoteSurge:     "the backlog needs %.0f: %.0f wait, with %.0f slot-seconds of work",
	NoteUnused: "%.0f run on %.0f ready instances, of which task nodes use no more: the backlog starts no more " +
		"than %.0f",
	NotePending:     "one at least, since %.0f wait or run",
	NoteHold:        "%.0f were needed lately: no fewer for another %.0f s",
	NoteBegun:       "%.0f ran when this began to decide: no fewer for another %.0f s",
	NoteWanted:      "%.0f were wanted within the last %.0f s",
	NoteFull:        "with fewer than %.0f the %.0f running would fill more than 85 %% of the slots",
	NoteIdle:        "no work: the last instance stays, idle for %.0f s of %.0f s",
	NoteRateUp:      "%.0f wanted, no more than %.0f now: growth is limited",
	NoteSlowStart:   "%.0f wanted, no more than %.0f until the first one is ready",
	NoteRateDown:    "%.0f wanted, no fewer than %.0f this minute: the way down is limited",
	NoteRunning:     "%.0f are busy with the %.0f running requests",
	NoteWake:        "from zero for %.0f requests",
	NoteZeroOff:     "the last instance stays: scaling to zero is off",
	NoteDue:         "one for %.0f entries that become due within a cold start of %.0f s",
	NoteLastRequest: "the last instance stays: it is not known when the last request came",
	NoteZero:        "no request for %.0f s",
	NoteUnhealthy:   "%.0f are unhealthy: others are started for them",
	NoteMin:         "the minimum is %.0f, %.0f wanted",
	NoteFloor:       "the minimum by a schedule is %.0f, %.0f wanted",
	NoteMax:         "the maximum is %.0f, %.0f wanted",
	NoteBudget:      "the budget of all deployments leaves %.0f of %.0f",
	NoteCap:         "the emergency cap is %.0f, %.0f wanted",
	NoteBlocked:     "starts fail: no more are begun for another %.0f s, at most %.0f",
	NoteFrozen:      "%s is %.0f s old: not down to %.0f, stays at %.0f",
	NoteUpOnly:      "the mode is up-only: not down to %.0f, stays at %.0f",
	NoteAdvise:      "the mode is advise: %.0f is published and not applied",
	NotePolicy:      "the stored policy is not allowed: %s",
	NoteEnough:      "%.0f are enough for the %.0f that wait or run",
	NoteRatio:       "the metric is %.2f of its target: %.0f wanted",
	NoteTolerance:   "the metric is %.2f of its target, within the tolerance of %.2f",
	NoteWindow:      "%.0f were wanted within the window of %.0f s",
	NoteLoad:        "the utilisation is %.2f, compared with %.2f",
	NoteDeadBand:    "the utilisation is %.2f, between %.2f and %.2f: no change",
	NoteOutOfCap:    "%.0f requests were refused beside %.1f that were served",
	NoteNextCycle:   "the next cycle is in %.0f s",
}

// String is the sentence of the note.
func (n Note) String() string {
	text, known := texts[n.Code]
	if !known {
		return string(n.Code)
	}
	var args []any
	numbers := strings.Count(text, "%") - 2*strings.Count(text, "%%")
	if strings.Contains(text, "%s") {
		args = append(args, cmp.Or(n.Text, sources[n.Source], "a source"))
		numbers--
	}
	for _, number := range n.Args[:numbers] {
		args = append(args, number)
	}
	return fmt.Sprintf(text, args...)
}

// Explain is the decision as one line for people: the change, then each reason.
func (d Decision) Explain() string {
	reasons := make([]string, len(d.Notes))
	for i, note := range d.Notes {
		reasons[i] = note.String()
	}
	return fmt.Sprintf("%d -> %d: %s", d.Current, d.Desired, strings.Join(reasons, "; "))
}
