package sizing

import (
	"cmp"
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
)

var header = []string{
	"step", "check", "push_batch", "group", "payload_bytes", "commits", "push_commits", "server_cores",
	"entries", "rate", "server_us", "client_us", "wal_bytes",
}

// WritePoints writes one line a point; costs are per entry.
func WritePoints(w io.Writer, points []Point) error {
	out := csv.NewWriter(w)
	lines := [][]string{header}
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
	for _, p := range points {
		lines = append(lines, []string{
			string(p.Step), strconv.FormatBool(p.Check), strconv.Itoa(p.PushBatch), strconv.Itoa(p.Group),
			strconv.Itoa(p.PayloadBytes),
			number(p.Commits), number(p.PushCommits), strconv.Itoa(p.ServerCores),
			strconv.Itoa(p.Entries), number(p.Rate), number(p.ServerMicros), number(p.ClientMicros), number(p.WALBytes),
		})
	}
	return cmp.Or(out.WriteAll(lines), out.Error())
}

// ReadPoints reads what WritePoints wrote.
func ReadPoints(r io.Reader) ([]Point, error) {
	lines, err := csv.NewReader(r).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("read points: %w", err)
	}
	var points []Point
	for _, line := range lines[min(1, len(lines)):] {
		p := Point{Step: Step(line[0]), Check: line[1] == "true"}
		for i, into := range []any{
			&p.PushBatch, &p.Group, &p.PayloadBytes, &p.Commits, &p.PushCommits, &p.ServerCores,
			&p.Entries, &p.Rate, &p.ServerMicros, &p.ClientMicros, &p.WALBytes,
		} {
			if _, err := fmt.Sscan(line[i+2], into); err != nil {
				return nil, fmt.Errorf("read points: %s: %w", header[i+2], err)
			}
		}
		points = append(points, p)
	}
	return points, nil
}
