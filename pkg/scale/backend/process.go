package backend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"
)

// running is a process as the system reports it.
type running struct {
	pid     int
	group   int    // 0 where the system does not tell
	session int    // 0 where the system does not tell
	started uint64 // changes with each process that gets the id, and with nothing else; see bootID
	ended   bool   // a zombie: nothing waited for it yet
}

// condition is how far the processes of an instance are.
type condition int

const (
	gone     condition = iota // none is left
	orphaned                  // the one that was started has ended, others of it have not
	doubtful                  // that one has ended, and nothing tells whether others in its session are of it
	alive
)

// errUnknown is wrapped where the processes of an instance cannot be read: it may run.
var errUnknown = errors.New("cannot tell whether it runs")

// sessionKept is for how long after an instance was seen the session of its first process is taken for its own. After
// that its instance is in doubt: it keeps its device, and no process of the session gets a signal.
const sessionKept = 10 * time.Second

// processes are those of an instance, the one that was started first. It fills in an id that the record lacks.
// An error means that the answer is unknown, and never that there is none.
func (l *Local) processes(ctx context.Context, r *record) (condition, []running, error) {
	unknown := func(err error) (condition, []running, error) {
		return alive, nil, fmt.Errorf("processes of %s: %w: %w", r.Name, errUnknown, err)
	}
	boot, err := bootID()
	if err != nil {
		return unknown(err)
	}
	if r.Boot != "" && r.Boot != boot {
		return gone, nil, nil
	}
	first, found := running{}, false
	if r.PID != 0 {
		if first, found, err = lookUp(ctx, r.PID); err != nil {
			return unknown(err)
		}
		if found && !first.ended && first.started == r.Started {
			l.sees(r.Name)
			return alive, []running{first}, nil
		}
	}
	reused := found && first.started != r.Started
	own, doubt, err := l.members(ctx, r, reused)
	if err != nil {
		return unknown(err)
	}
	if len(own) > 0 {
		l.sees(r.Name)
	}
	switch {
	case len(own) == 0 && doubt:
		return doubtful, nil, nil
	case len(own) == 0:
		return gone, nil, nil
	case r.PID != 0:
		return orphaned, own, nil
	}
	// A leader died between the start and its record. The first process leads the group of the others.
	if i := slices.IndexFunc(own, func(p running) bool { return p.pid == p.group || p.group == 0 }); i > 0 {
		own[0], own[i] = own[i], own[0]
	}
	r.PID, r.Started, r.Boot = own[0].pid, own[0].started, boot
	return alive, own, l.write(*r)
}

// members are the processes that an instance has left when its first one is not known or has ended: those that carry
// its mark, and those of its session. The system gives the id of a session to no process while one is in it, so that
// the others are its own where one of them is marked, or was a moment ago; after that the id may be that of
// another session, and there is a doubt.
func (l *Local) members(ctx context.Context, r *record, reused bool) (own []running, doubt bool, err error) {
	all, err := everyProcess(ctx)
	if err != nil {
		return nil, false, err
	}
	var unmarked []running
	certain := l.saw(r.Name)
	for _, p := range all {
		if p.ended {
			continue
		}
		mine, err := l.marked(ctx, p, r.Name)
		if err != nil {
			return nil, false, err
		}
		inSession := r.PID != 0 && p.session == r.PID && !reused
		certain = certain || mine && inSession
		if mine {
			own = append(own, p)
		} else if inSession {
			unmarked = append(unmarked, p)
		}
	}
	if certain {
		return append(own, unmarked...), false, nil
	}
	return own, len(unmarked) > 0, nil
}

// marked says whether a process, or the one that started it, was started as an instance.
func (l *Local) marked(ctx context.Context, p running, name string) (bool, error) {
	env, err := environment(ctx, p.pid)
	if err != nil {
		return false, err
	}
	return slices.Contains(env, envInstance+"="+name) && slices.Contains(env, envDir+"="+l.cfg.Dir), nil
}

// signal reaches all processes of an instance: those of the group of the first one, and others that it started.
func signal(r record, all []running, sig syscall.Signal) error {
	var errs []error
	grouped := false
	for _, p := range all {
		if p.pid == r.PID || p.group == r.PID {
			grouped = true
			continue
		}
		errs = append(errs, signalProcess(p.pid, sig))
	}
	if grouped {
		errs = append(errs, signalGroup(r.PID, sig))
	}
	errs = slices.DeleteFunc(errs, func(err error) bool {
		return err == nil || errors.Is(err, syscall.ESRCH) || errors.Is(err, os.ErrProcessDone)
	})
	if len(errs) > 0 {
		return fmt.Errorf("send %v to %s: %w", sig, r.Name, errors.Join(errs...))
	}
	return nil
}
