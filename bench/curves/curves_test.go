package curves

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/devpostgres"
)

// TestMain lets the test's own program be the process of a node.
func TestMain(m *testing.M) {
	if len(os.Args) != 3 || os.Args[1] != "node" {
		os.Exit(m.Run())
	}
	if err := RunNode(context.Background(), os.Args[2], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func newHarness(t *testing.T) *Harness {
	t.Helper()
	server, err := devpostgres.Start(t.Context(), devpostgres.Config{Fast: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop(context.Background()) })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := &Harness{
		Server: server.Config(), Program: []string{self, "node"}, Entries: 500, Short: true,
		PointTime: 10 * time.Second, Log: slog.New(slog.DiscardHandler),
	}
	if err := h.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close(context.Background()) })
	return h
}

func TestAPointCountsWhatAllNodesDid(t *testing.T) {
	h := newHarness(t)
	points, err := h.Measure(t.Context(), Axis{Name: "nodes", Measure: (*Harness).nodes}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if len(points) != 4 || points[3].Series != "16 lanes" || points[3].X != "2" {
		t.Fatalf("got %d points, want 2 and 2: %+v", len(points), points)
	}
	for _, p := range points {
		// A push of an entry is not in it: what was drained cost a lock record and two deletes.
		if wal := p.Figures[walTitle]; wal < 200 || wal > 1000 || p.Figures[rateTitle] <= 0 || p.Figures[rssTitle] < 5 {
			t.Errorf("%s with %s: %v", p.Series, p.X, p.Figures)
		}
	}
}

func TestAnAxisOutOfTimeKeepsItsPoints(t *testing.T) {
	slow := Axis{Name: "slow", Measure: func(_ *Harness, ctx context.Context, add func(Point)) error {
		add(Point{X: "1"})
		<-ctx.Done()
		return ctx.Err()
	}}
	h := &Harness{Log: slog.New(slog.DiscardHandler)}
	points, err := h.Measure(t.Context(), slow, time.Millisecond)
	if len(points) != 1 || points[0].Axis != "slow" || !errors.Is(err, errTime) {
		t.Errorf("got %v and %v, want one point and the news that time was over", points, err)
	}
}

func TestPicturesAndTablesShowEverySeries(t *testing.T) {
	axis := Axis{Name: "test", Title: "Test", X: "things"}
	var points []Point
	for _, series := range []string{"slow", "fast"} {
		for i := range 3 {
			points = append(points, Point{Axis: "test", Series: series, X: count(1000 * i), Figures: Figures{rateTitle: float64(100 * i), claim99: 1.5}})
		}
	}
	var table strings.Builder
	if err := WriteTable(&table, axis, points); err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	if err := WritePictures(folder, axis, points); err != nil {
		t.Fatal(err)
	}
	svg, err := os.ReadFile(filepath.Join(folder, "test.svg"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"slow", "fast", "2k"} {
		if !strings.Contains(table.String(), want) || !strings.Contains(string(svg), ">"+want) {
			t.Errorf("%q is missing in the table or in the picture:\n%s", want, table.String())
		}
	}
	if info, err := os.Stat(filepath.Join(folder, "test.png")); err != nil || info.Size() < 1000 {
		t.Errorf("the picture as PNG: %v, %v", info, err)
	}
}
