package sizing

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"testing"
)

// made are points of a known model, without noise: 100 us a commit, 10 a lock, 5 an entry, 2 a KB on the server.
func made() []Point {
	var points []Point
	for _, step := range []Step{Push, Work} {
		for _, s := range []Shape{{1, 1, 1024}, {0.001, 1, 50}, {0.001, 50, 50}, {0.001, 1, 4096}, {0.5, 10, 100}, {0.001, 2, 9000}, {0.1, 1, 1900}} {
			f := s.features()
			server := 100*f[0] + 10*f[1] + 5*f[2] + 2*f[3] + 7*f[4] + 3*f[5]
			points = append(points, Point{Step: step, Shape: s, Cost: Cost{server, 0.5 * server, 300 + 50*f[3]}})
		}
	}
	return points
}

func TestFitFindsTheModelBehindThePoints(t *testing.T) {
	m, err := Fit(made())
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range (linear{100, 10, 5, 2, 7, 3}) {
		if got := m[Push].Server[i]; math.Abs(got-want) > 1e-6 {
			t.Errorf("coefficient %d is %v, want %v", i, got, want)
		}
	}
	p := Point{Step: Sustained, Shape: Shape{0.01, 1, 1024}, PushCommits: 1}
	if got := m.Predict(p).ServerMicros; math.Abs(got-(117+18)) > 1e-6 {
		t.Errorf("a sustained entry is predicted to take %v us, want 117 for its push and 18 for its work", got)
	}
}

func TestFitLeavesOutWhatWouldBeNegative(t *testing.T) {
	points := made()
	for i := range points {
		points[i].WALBytes = 1000 - 100*points[i].features()[1]
	}
	m, err := Fit(points)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range m[Work].WAL {
		if c < 0 {
			t.Errorf("coefficient %d is %v", i, c)
		}
	}
}

func TestFitWantsPointsThatAreNoChecks(t *testing.T) {
	points := made()
	for i := range points {
		points[i].Check = true
	}
	if _, err := Fit(points); !errors.Is(err, ErrTooFew) {
		t.Errorf("fitted to no points at all: %v", err)
	}
}

func TestRateIsThatOfTheScarcerSide(t *testing.T) {
	c := Cost{ServerMicros: 30, ClientMicros: 10}
	if got := c.Rate(2, 0); got != 50_000 {
		t.Errorf("two shared cores do %v entries/s, want 50,000", got)
	}
	if got := c.Rate(2, 1); math.Abs(got-33_333) > 1 {
		t.Errorf("with a core for the server it is %v entries/s, want 33,333", got)
	}
	if got := c.Capacity(8, 0.6); got != 160_000 {
		t.Errorf("eight cores at 60 %% carry %v entries/s, want 160,000", got)
	}
}

func TestPointsComeBackAsTheyWereWritten(t *testing.T) {
	points := made()
	points[0].Check, points[1].ServerCores, points[2].PushBatch = true, 1, 1000
	var file bytes.Buffer
	if err := WritePoints(&file, points); err != nil {
		t.Fatal(err)
	}
	again, err := ReadPoints(&file)
	if err != nil {
		t.Fatal(err)
	}
	for i := range points { // six digits are kept
		points[i].ServerMicros, again[i].ServerMicros = math.Round(points[i].ServerMicros), math.Round(again[i].ServerMicros)
		points[i].ClientMicros, again[i].ClientMicros = math.Round(points[i].ClientMicros), math.Round(again[i].ClientMicros)
		points[i].WALBytes, again[i].WALBytes = math.Round(points[i].WALBytes), math.Round(again[i].WALBytes)
	}
	if !reflect.DeepEqual(points, again) {
		t.Errorf("wrote %+v\nread %+v", points, again)
	}
}
