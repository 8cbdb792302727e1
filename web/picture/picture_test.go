package picture_test

import (
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"html/template"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock/penstock/web/picture"
)

var (
	update  = flag.Bool("update", false, "write the golden files")
	gallery = flag.String("gallery", "", "write a page with all pictures to this file")
)

var start = time.Date(2026, 3, 28, 14, 20, 0, 0, time.UTC)

func ptr(v float64) *float64 { return &v }

// drawn is a picture and its table.
type drawn interface {
	HTML() template.HTML
	Table() picture.Table
}

// examples are the pictures that the golden files and the gallery show. Each name is a golden file.
func examples() []struct {
	name string
	of   drawn
} {
	return []struct {
		name string
		of   drawn
	}{
		{"flow", exampleFlow()},
		{"flow_unbalanced", picture.StateFlow{Initial: picture.State{Count: 3}, Awaiting: 5, Estimated: true, DoneNote: "last hour"}},
		{"heat", exampleHeat()},
		{"heat_empty", picture.HeatMap{Title: "Waiting time"}},
		{"histogram", exampleHistogram()},
		{"histogram_empty", picture.Histogram{Title: "Run time"}},
		{"waterfall", exampleWaterfall()},
		{"waterfall_open", picture.Waterfall{Now: start.Add(90 * time.Second), Phases: []picture.Phase{
			{Name: "push", Kind: picture.PhasePush, Start: start},
			{Name: "wait", Kind: picture.PhaseWait, Start: start, Open: true, Detail: "no free slot of llama-70b"},
		}}},
		{"slots", exampleSlots()},
		{"locks", exampleLocks()},
		{"lane", exampleLane()},
		{"lane_empty", picture.EventLane{Title: "Decisions about llama"}},
		{"shares", exampleShares()},
		{"jain", exampleJain()},
		{"spark", exampleSpark()},
		{"spark_empty", picture.Sparkline{Title: "in"}},
		{"cron", exampleCron()},
		{"progress", picture.Progress{Title: "Batch 12", Total: 12000, Done: 8400, Bad: 31, Going: 1200}},
		{"progress_unknown", picture.Progress{Title: "Operation 7", Total: -1, Done: 8400}},
	}
}

func exampleFlow() picture.StateFlow {
	return picture.StateFlow{
		Initial:   picture.State{Count: 1145, Href: "/ui/entries?state=initial"},
		Waiting:   picture.State{Count: 128430, Href: "/ui/entries?state=pending"},
		Computing: picture.State{Count: 345, Href: "/ui/entries?state=computing"},
		Disabled:  picture.State{Count: 27, Href: "/ui/entries?state=disabled"},
		Done:      picture.State{Count: 1284300},
		Failed:    picture.State{Count: 112, Href: "/ui/failures"},
		In:        ptr(124), Promoted: ptr(3.4), Claimed: ptr(121), Finished: ptr(118), FailedRate: ptr(0.05), Retried: ptr(2.1),
		Awaiting: 129575, DoneNote: "last hour",
	}
}

func exampleHeat() picture.HeatMap {
	h := picture.HeatMap{
		Title:  "Waiting time of queue chat",
		Bounds: []float64{0.01, 0.1, 0.5, 1, 5, 30, 120, 600, math.Inf(1)},
	}
	for i := range 60 {
		column := picture.HeatColumn{At: start.Add(time.Duration(i) * time.Minute)}
		middle := 2.5 + 2*math.Sin(float64(i)/9) + 0.4*math.Sin(float64(i)*2.1)
		for row := range h.Bounds {
			column.Counts = append(column.Counts, int64(900*math.Exp(-math.Pow(float64(row)-middle, 2)/1.8)))
		}
		at := func(row float64) float64 { return math.Pow(10, row*0.62-2) }
		column.P50, column.P95, column.P99 = at(middle), at(middle+1.3), at(middle+2.1)
		if i > 22 && i < 26 {
			column.Counts, column.P50, column.P95, column.P99 = make([]int64, len(h.Bounds)), math.NaN(), math.NaN(), math.NaN()
		}
		h.Cells = append(h.Cells, column)
	}
	return h
}

func exampleHistogram() picture.Histogram {
	return picture.Histogram{
		Title:   "Run time of queue chat",
		Bounds:  []float64{0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, math.Inf(1)},
		Counts:  []int64{0, 12, 160, 900, 2210, 3100, 1500, 420, 130, 40, 9, 1},
		Markers: []picture.Marker{{Name: "p50", Value: 1.4}, {Name: "p95", Value: 8.2}, {Name: "p99", Value: 31}},
	}
}

func exampleWaterfall() picture.Waterfall {
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	return picture.Waterfall{Now: at(30), Phases: []picture.Phase{
		{Name: "push", Kind: picture.PhasePush, Start: at(0), Detail: "by gateway-2"},
		{Name: "wait", Kind: picture.PhaseWait, Start: at(0), End: at(4.2), Detail: "position 12 of lane 0/acme"},
		{Name: "lock", Kind: picture.PhaseLock, Start: at(4.2), End: at(4.35), Attempt: 1, Detail: "gpu-node-3, token 88120"},
		{Name: "slot", Kind: picture.PhaseSlot, Start: at(4.35), End: at(5.1), Attempt: 1, Detail: "llama-70b/s1 slot 3"},
		{Name: "call", Kind: picture.PhaseFailed, Start: at(5.1), End: at(9), Attempt: 1, Detail: "503 overloaded"},
		{Name: "wait", Kind: picture.PhaseWait, Start: at(9), End: at(14), Attempt: 2, Detail: "backoff"},
		{Name: "slot", Kind: picture.PhaseSlot, Start: at(14), End: at(14.4), Attempt: 2},
		{Name: "first byte", Kind: picture.PhaseCall, Start: at(14.4), End: at(15.6), Attempt: 2, Detail: "llama-70b/s2 slot 0"},
		{Name: "stream", Kind: picture.PhaseStream, Start: at(15.6), End: at(23.7), Attempt: 2, Detail: "412 tokens"},
		{Name: "finish", Kind: picture.PhaseFinish, Start: at(23.7), Attempt: 2, Detail: "done"},
		{Name: "callback", Kind: picture.PhaseCallback, Start: at(23.7), End: at(24.1), Attempt: 2, Detail: "200 from hooks.acme.example"},
	}}
}

func exampleSlots() picture.SlotGrid {
	g := picture.SlotGrid{Title: "llama-70b/s1"}
	states := []picture.SlotState{
		picture.SlotBusy, picture.SlotBusy, picture.SlotBusy, picture.SlotIdle, picture.SlotIdle, picture.SlotLoading,
		picture.SlotUnhealthy, picture.SlotDraining, picture.SlotDoubt, picture.SlotBusy,
	}
	for i := range 40 {
		g.Slots = append(g.Slots, picture.Slot{State: states[i%len(states)], Detail: "entry 4711", Href: "/ui/entries/4711"})
	}
	return g
}

func exampleLocks() picture.LockMatrix {
	m := picture.LockMatrix{Node: "gpu-node-3", Idle: 9}
	for i := range 26 {
		m.Locks = append(m.Locks, picture.LockCell{Key: fmt.Sprintf("user-%d", i), Age: 40 / float64(i+1), P99: 12, Href: "/ui/locks/1"})
	}
	m.Locks[4].Problem = "its node lives and does not list its token"
	m.Locks[20].P99 = 0
	return m
}

func exampleShares() picture.Shares {
	return picture.Shares{Title: "Share of each flow", Flows: []picture.Share{
		{"acme", 0.4, 0.41},
		{"globex", 0.3, 0.22},
		{"initech-research-and-development", 0.2, 0.27},
		{"", 0.1, 0.1},
	}}
}

func exampleJain() picture.JainLine {
	j := picture.JainLine{Title: "Jain index"}
	for i := range 40 {
		v := 0.97 - 0.2*math.Exp(-math.Pow(float64(i-18), 2)/20)
		if i == 30 {
			v = math.NaN()
		}
		j.Points = append(j.Points, picture.JainPoint{At: start.Add(time.Duration(i) * time.Minute), Index: v})
	}
	return j
}

func exampleSpark() picture.Sparkline {
	s := picture.Sparkline{Title: "in and out of chat", Unit: " /s"}
	for i := range 60 {
		s.Values = append(s.Values, 100+40*math.Sin(float64(i)/7)+float64(i%5)*6)
		s.Second = append(s.Second, 90+20*math.Sin(float64(i)/9))
	}
	return s
}

func exampleCron() picture.CronStrip {
	zone, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		panic(err)
	}
	from := start.In(zone) // the night of a change to summer time
	every := func(first, step time.Duration, n int) []time.Time {
		var fires []time.Time
		for i := range n {
			fires = append(fires, from.Add(first+time.Duration(i)*step))
		}
		return fires
	}
	return picture.CronStrip{From: from, Span: 24 * time.Hour, Jobs: []picture.CronRow{
		{Job: "nightly-report", Href: "/ui/cron/nightly-report", Fires: every(10*time.Hour, 0, 1)},
		{Job: "hourly", Href: "/ui/cron/hourly", Fires: every(40*time.Minute, time.Hour, 24)},
		{Job: "each-minute", Fires: every(0, time.Minute, 1440)},
		{Job: "office-hours-only", Fires: every(17*time.Hour, 5*time.Minute, 60)},
		{Job: "old-import", Off: true},
		{Job: "monthly"},
	}}
}

func TestPicturesMatchTheirGoldenFiles(t *testing.T) {
	for _, example := range examples() {
		got := fold(string(example.of.HTML())) + "\n" + fold(string(picture.Data(example.of.Table())))
		path := filepath.Join("testdata", example.name+".html")
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s differs from %s; if that is meant, run go test ./web/picture -update and view the gallery", example.name, path)
		}
	}
}

func exampleLane() picture.EventLane {
	return picture.EventLane{
		Title: "Decisions about llama", From: start, To: start.Add(time.Hour),
		Events: []picture.LaneEvent{
			{At: start.Add(-time.Minute), Before: 9, After: 1, Text: "before the line begins"},
			{At: start.Add(10 * time.Minute), Before: 1, After: 5, Text: "the backlog needs 5: 41 wait, with 120 slot-seconds of work"},
			{At: start.Add(40 * time.Minute), Before: 5, After: 2, Text: "level 2 <b>is</b> kept", Href: "/ui/autoscaler"},
		},
	}
}

// fold puts each element on a line, so that a change of a golden file can be read.
func fold(markup string) string {
	return strings.ReplaceAll(markup, "><", ">\n<") + "\n"
}

// unsafe is what the content security policy refuses, or what would run.
var unsafe = regexp.MustCompile(`(?i)<script|<style|<foreignObject|<image|<use| style=| on[a-z]+=|javascript:|xlink|url\(`)

func TestPicturesNameNothingThatThePolicyForbids(t *testing.T) {
	for _, example := range examples() {
		markup := string(example.of.HTML()) + string(picture.Data(example.of.Table()))
		if found := unsafe.FindString(markup); found != "" {
			t.Errorf("%s contains %q", example.name, found)
		}
		wellFormed(t, example.name, markup)
	}
}

// hostile are texts of users that try to leave their place.
var hostile = []string{
	`<script>alert(1)</script>`, `"><svg onload=alert(1)>`, `' onmouseover='alert(1)`, `</title><img src=x onerror=alert(1)>`,
	`]]><script>alert(1)</script>`, "\x00\x08null", "\u202Egnp.exe", `javascript:alert(1)`, `&lt;b&gt;`, strings.Repeat("W", 5000),
}

func TestTextsOfUsersStayTexts(t *testing.T) {
	for _, text := range hostile {
		for i, p := range []drawn{
			picture.Waterfall{Phases: []picture.Phase{{Name: text, Detail: text, Kind: picture.PhaseKind(text), Start: start, End: start.Add(1)}}},
			picture.SlotGrid{Title: text, Slots: []picture.Slot{{State: picture.SlotState(text), Detail: text, Href: text}}},
			picture.LockMatrix{Node: text, Locks: []picture.LockCell{{Key: text, Problem: text, Href: text}}},
			picture.Shares{Title: text, Flows: []picture.Share{{Flow: text, Wanted: 1, Got: 1}}},
			picture.CronStrip{From: start, Span: time.Hour, Jobs: []picture.CronRow{{Job: text, Href: text}}},
			picture.Progress{Title: text},
			picture.Sparkline{Title: text, Unit: text, Values: []float64{1}},
			picture.HeatMap{Title: text, Bounds: []float64{1}, Cells: []picture.HeatColumn{{Counts: []int64{1}}}},
			picture.Histogram{Title: text, Bounds: []float64{1}, Counts: []int64{1}, Markers: []picture.Marker{{Name: text, Value: 1}}},
			picture.StateFlow{DoneNote: text, Done: picture.State{Href: text}},
		} {
			name := fmt.Sprintf("picture %d with %.20q", i, text)
			markup := string(p.HTML()) + string(picture.Data(p.Table()))
			for element, attributes := range wellFormed(t, name, markup) {
				if !drawnElements[element] {
					t.Errorf("%s has an element %s", name, element)
				}
				for attribute, value := range attributes {
					if strings.HasPrefix(attribute, "on") || attribute == "style" || attribute == "href" && !strings.HasPrefix(value, "/ui/") {
						t.Errorf("%s has an active attribute %s=%q", name, attribute, value)
					}
				}
			}
			if strings.Contains(markup, strings.Repeat("W", 300)) {
				t.Errorf("%s is not shortened", name)
			}
		}
	}
}

// drawnElements are the elements that pictures consist of.
var drawnElements = func() map[string]bool {
	names := map[string]bool{}
	for _, name := range strings.Fields(`all svg g a rect circle line path text tspan title desc p b span div ul li
		details summary table caption thead tbody tr th td`) {
		names[name] = true
	}
	return names
}()

// wellFormed parses markup and returns the attributes of its elements.
func wellFormed(t *testing.T, name, markup string) map[string]map[string]string {
	t.Helper()
	elements := map[string]map[string]string{}
	decoder := xml.NewDecoder(strings.NewReader("<all>" + markup + "</all>"))
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return elements
		}
		if err != nil {
			t.Errorf("%s is not well formed: %v", name, err)
			return elements
		}
		if begin, ok := token.(xml.StartElement); ok {
			if elements[begin.Name.Local] == nil {
				elements[begin.Name.Local] = map[string]string{}
			}
			for _, attribute := range begin.Attr {
				elements[begin.Name.Local][attribute.Name.Local] = attribute.Value
			}
		}
	}
}

func TestNoCoordinateIsNotANumber(t *testing.T) {
	number := rapid.OneOf(rapid.Float64(), rapid.SampledFrom([]float64{0, -1, math.NaN(), math.Inf(1), math.Inf(-1), 1e308}))
	moment := rapid.Custom(func(t *rapid.T) time.Time {
		return start.Add(time.Duration(rapid.Int64Range(-1e15, 1e15).Draw(t, "at")))
	})
	rapid.Check(t, func(rt *rapid.T) {
		v := func() float64 { return number.Draw(rt, "v") }
		n := func() int64 { return rapid.Int64Range(0, math.MaxInt64/4).Draw(rt, "n") }
		for _, p := range []drawn{
			picture.HeatMap{Bounds: []float64{0.1, 1, v()}, Cells: []picture.HeatColumn{{At: start, Counts: []int64{n(), 0, 1, 2}, P50: v(), P95: v(), P99: v()}}},
			picture.Histogram{Bounds: []float64{0.1, v()}, Counts: []int64{n() / 2, 1, 3}, Markers: []picture.Marker{{"p50", v()}}},
			picture.Waterfall{Now: moment.Draw(rt, "now"), Phases: []picture.Phase{
				{Start: moment.Draw(rt, "a"), End: moment.Draw(rt, "b")}, {Start: moment.Draw(rt, "c"), Open: true},
			}},
			picture.LockMatrix{Locks: []picture.LockCell{{Age: v(), P99: v()}}, Idle: rapid.Int().Draw(rt, "idle")},
			picture.Shares{Flows: []picture.Share{{"a", v(), v()}, {"b", v(), v()}}},
			picture.JainLine{Points: []picture.JainPoint{{moment.Draw(rt, "d"), v()}, {moment.Draw(rt, "e"), v()}}},
			picture.Sparkline{Values: []float64{v(), v()}, Second: []float64{v()}},
			picture.Progress{Total: n(), Done: n(), Bad: n()},
		} {
			markup := string(p.HTML()) + string(picture.Data(p.Table()))
			if regexp.MustCompile(`"[^"]*(NaN|Inf)[^"]*"`).MatchString(markup) {
				rt.Fatalf("%T has a coordinate that is not a number: %s", p, markup)
			}
		}
		gauge := string(picture.Gauge{Title: "CPU", Value: v(), Mark: v()}.HTML())
		if strings.Contains(gauge, "NaN") {
			rt.Fatalf("gauge: %s", gauge)
		}
	})
}

func TestIdentityOfStatesIsChecked(t *testing.T) {
	balanced := exampleFlow()
	if !balanced.Balanced() || !strings.Contains(string(balanced.HTML()), "balanced") {
		t.Error("initial + pending = computing + awaiting compute holds and is not shown to hold")
	}
	balanced.Awaiting++
	if balanced.Balanced() || !strings.Contains(string(balanced.HTML()), "differs by −1") {
		t.Error("a sum that is one too large is not shown")
	}
}

func TestLinksLeadToThisServerOnly(t *testing.T) {
	for href, want := range map[string]bool{
		"/ui/entries": true, "//evil.example": false, `/\evil.example`: false, "https://evil.example": false, "javascript:x": false, "": false,
	} {
		markup := string(picture.SlotGrid{Slots: []picture.Slot{{Href: href}}}.HTML())
		if got := strings.Contains(markup, "<a "); got != want {
			t.Errorf("%q: got a link %v, want %v", href, got, want)
		}
	}
}

func TestLatenessIsJudgedAgainstTheP99(t *testing.T) {
	for _, c := range []struct {
		age, p99 float64
		want     string
	}{
		{1, 10, "pic-a-1"}, {6, 10, "pic-a-2"}, {10, 10, "pic-a-3"}, {20, 10, "pic-a-4"}, {5, 0, "pic-a-new"}, {5, math.NaN(), "pic-a-new"},
	} {
		markup := string(picture.LockMatrix{Locks: []picture.LockCell{{Age: c.age, P99: c.p99}}}.HTML())
		if !strings.Contains(markup, c.want) {
			t.Errorf("age %v at a p99 of %v: want %s in %s", c.age, c.p99, c.want, markup)
		}
	}
}

// TestGallery writes a page with every picture: go test ./web/picture -run Gallery -gallery /path/page.html
func TestGallery(t *testing.T) {
	if *gallery == "" {
		t.Skip("no -gallery")
	}
	css, err := os.ReadFile("../static/app.css")
	if err != nil {
		t.Fatal(err)
	}
	pictures, err := os.ReadFile("../static/picture.css")
	if err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	fmt.Fprintf(&page, `<!doctype html><meta charset=utf-8><meta name=viewport content="width=device-width">
<style>%s%s
body{display:block;padding:16px}section{background:var(--surface);border:1px solid var(--line);border-radius:12px;padding:14px 16px;
margin:0 0 14px;max-width:1040px}</style>`, css, pictures)
	for _, example := range examples() {
		fmt.Fprintf(&page, "<section id=%s><h2>%s</h2>%s%s</section>", example.name, example.name, example.of.HTML(), picture.Data(example.of.Table()))
	}
	fmt.Fprintf(&page, "<section><h2>legends, gauge</h2>%s%s%s%s</section>", picture.SlotLegend(), picture.LockLegend(),
		picture.Gauge{Title: "CPU", Value: 0.62, Mark: 0.85}.HTML(), picture.Gauge{Title: "Memory", Value: 0.91, Mark: 0.9}.HTML())
	if err := os.WriteFile(*gallery, []byte(page.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}

// The axis of a short period has seconds: a minute would be written several times.
func TestTimesOfAShortPeriodDiffer(t *testing.T) {
	t.Parallel()
	h := picture.HeatMap{Title: "Waiting time", Bounds: []float64{1, 10}}
	for i := range 12 {
		h.Cells = append(h.Cells, picture.HeatColumn{At: start.Add(time.Duration(i) * 10 * time.Second), Counts: []int64{1, 0}})
	}
	for _, want := range []string{">14:20:00<", ">14:20:30<", ">14:21:30<"} {
		if drawn := string(h.HTML()); !strings.Contains(drawn, want) {
			t.Errorf("two minutes are drawn without %s", want)
		}
	}
}
