package backend

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/durable"
)

// record is the file of an instance. It is written before its process is started: a record without a process is
// a start that failed, and a process of which the record does not know the id is found by its environment.
type record struct {
	Name         string    `json:"name"`
	Deployment   string    `json:"deployment"`
	Model        string    `json:"model"`
	TemplateHash string    `json:"template_hash,omitempty"`
	Endpoint     string    `json:"endpoint"`
	Slots        int       `json:"slots"`
	Device       string    `json:"device,omitempty"`
	Began        time.Time `json:"began"`
	PID          int       `json:"pid,omitempty"` // of the first process, and of its group
	Started      uint64    `json:"started,omitempty"`
	Boot         string    `json:"boot,omitempty"` // with Started tells it from a later process of that id
	Stopping     time.Time `json:"stopping,omitzero"`
}

func (l *Local) path(name string) string { return filepath.Join(l.cfg.Dir, name+".json") }

// write replaces a record in one step: a leader that dies, and a machine that loses its power, leaves the old one or
// the new one.
func (l *Local) write(r record) error {
	text, err := json.Marshal(r)
	if err == nil {
		err = durable.WriteFile(l.path(r.Name), text)
	}
	if err != nil {
		return fmt.Errorf("write the record of %s: %w", r.Name, err)
	}
	return nil
}

// records reads all records. One that cannot be understood and of which no process is found, as a crash of the machine
// may leave, is set aside: it is the record of a start that never was.
func (l *Local) records(ctx context.Context) ([]record, error) {
	entries, err := os.ReadDir(l.cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("list records of local instances: %w", err)
	}
	var all []record
	for _, entry := range entries {
		if filepath.Ext(entry.Name()) != ".json" {
			continue
		}
		path := filepath.Join(l.cfg.Dir, entry.Name())
		text, err := os.ReadFile(path) //nolint:gosec // a record of ours
		if err != nil {
			return nil, fmt.Errorf("read the record of a local instance: %w", err)
		}
		var r record
		name := strings.TrimSuffix(entry.Name(), ".json")
		err = json.Unmarshal(text, &r)
		if err == nil && r.Name == name {
			all = append(all, r)
			continue
		}
		if err == nil {
			err = fmt.Errorf("it is of the instance %q", r.Name)
		}
		if err := l.setAside(ctx, name, err); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// setAside gives a record that cannot be understood another name, unless processes of its instance run.
func (l *Local) setAside(ctx context.Context, name string, cause error) error {
	own, _, err := l.members(ctx, &record{Name: name}, false)
	if err != nil {
		return fmt.Errorf("processes of %s, whose record cannot be read: %w: %w", name, errUnknown, err)
	}
	if len(own) > 0 {
		return fmt.Errorf("the record %s cannot be read, and process %d of its instance runs: end it: %w",
			l.path(name), own[0].pid, cause)
	}
	aside := l.path(name) + ".unreadable"
	if err := os.Rename(l.path(name), aside); err != nil {
		return fmt.Errorf("set an unreadable record aside: %w", err)
	}
	l.cfg.Log.WarnContext(ctx, "the record of a local instance cannot be read, and no process of it runs: set aside",
		"instance", name, "file", aside, "error", cause)
	return nil
}

// forget removes the record of an instance of which no process is left.
func (l *Local) forget(name string) error {
	if err := os.Remove(l.path(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget local instance: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.ended, name)
	delete(l.seen, name)
	return nil
}
