package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/penstock/penstock/pkg/invalidation"
)

// A push of lines is sent in requests of at most pushBatch entries and about pushBytes, each accepted whole
// or not at all.
const (
	pushBatch = 1000
	pushBytes = 8 << 20
)

// lineMax bounds a line of --lines, far above the largest payload a queue can take.
const lineMax = 32 << 20

// pushedLines is the report of a push of many.
type pushedLines struct {
	Entries  int   `json:"entries"`
	FirstID  int64 `json:"first_id"`
	LastID   int64 `json:"last_id"`
	Replayed int   `json:"replayed,omitempty"` // of the entries, those that were accepted before
}

// linePush pushes a payload a line in constant memory. An error names the line, and says which lines before it were
// accepted.
type linePush struct {
	api      conn
	queue    string
	template newEntry
	key      string // a line is pushed under it and its number

	batch       []newEntry
	bytes       int // of the batch
	first, line int // lines of the batch
	report      pushedLines
}

func (a *app) pushLines(ctx context.Context, api conn, queue, path string, template newEntry) error {
	source, size := a.in, int64(-1)
	if path != "-" {
		file, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("read payloads: %w", err)
		}
		defer file.Close()
		if info, err := file.Stat(); err == nil {
			size = info.Size()
		}
		source = file
	}
	p := &linePush{api: api, queue: queue, template: template, key: template.IdempotencyKey, first: 1}
	if p.key == "" {
		p.key = rand.Text()
		fmt.Fprintf(a.err, "if this breaks off, the same command with --idempotency-key %s pushes no line twice\n",
			p.key)
	}
	bar := a.progress(size, "push")
	defer bar.end()
	if err := p.run(ctx, source, bar); err != nil {
		return partialError{err}
	}
	bar.end()
	return printOne(a, p.report, func(w io.Writer) {
		replayed := ""
		if p.report.Replayed > 0 {
			replayed = fmt.Sprintf(", %d of them accepted before", p.report.Replayed)
		}
		fmt.Fprintf(w, "%d entries, ids %d to %d%s\n", p.report.Entries, p.report.FirstID, p.report.LastID, replayed)
	})
}

func (p *linePush) run(ctx context.Context, source io.Reader, bar *bar) error {
	scanner := bufio.NewScanner(source)
	scanner.Buffer(make([]byte, 64<<10), lineMax)
	bytesRead := int64(0)
	for scanner.Scan() {
		p.line++
		bytesRead += int64(len(scanner.Bytes())) + 1
		text := bytes.TrimSpace(scanner.Bytes())
		if len(text) == 0 {
			continue
		}
		if !json.Valid(text) {
			return usagef("line %d is not JSON; %d entries before line %d were accepted", p.line, p.report.Entries,
				p.first)
		}
		p.add(text)
		if len(p.batch) == pushBatch || p.bytes >= pushBytes {
			if err := p.flush(ctx); err != nil {
				return err
			}
			bar.set(bytesRead)
		}
	}
	if err := scanner.Err(); err != nil {
		return fmt.Errorf("read line %d; %d entries before line %d were accepted: %w", p.line+1, p.report.Entries,
			p.first, err)
	}
	return p.flush(ctx)
}

func (p *linePush) add(payload []byte) {
	entry := p.template
	entry.Payload = bytes.Clone(payload)
	entry.IdempotencyKey = p.key + "/" + strconv.Itoa(p.line)
	p.batch = append(p.batch, entry)
	p.bytes += len(payload)
}

// flush pushes the batch.
func (p *linePush) flush(ctx context.Context) error {
	if len(p.batch) == 0 {
		return nil
	}
	pushed, err := p.api.push(ctx, p.queue, p.batch...)
	switch {
	case undecided(err):
		return fmt.Errorf("whether lines %d to %d were accepted is unknown, the %d entries before them were; the same "+
			"command with --idempotency-key %s pushes no line twice: %w", p.first, p.line, p.report.Entries, p.key, err)
	case err != nil:
		return fmt.Errorf("lines %d to %d were not accepted, the %d entries before them were; the same command with "+
			"--idempotency-key %s pushes no line twice: %w", p.first, p.line, p.report.Entries, p.key, err)
	}
	if p.report.Entries == 0 {
		p.report.FirstID = int64(pushed[0].ID)
	}
	for _, entry := range pushed {
		if entry.Verdict == invalidation.Replayed {
			p.report.Replayed++
		}
	}
	p.report.Entries += len(pushed)
	p.report.LastID = int64(pushed[len(pushed)-1].ID)
	p.batch, p.bytes, p.first = p.batch[:0], 0, p.line+1
	return nil
}
