package devpostgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
)

// scriptPath lets the scripts find sleep and rm whatever PATH the program has.
const scriptPath = `PATH=$PATH:/usr/bin:/bin`

// supervisorScript runs one postmaster until it ends. Arguments: last signal, then the postmaster's command line.
// Each line of its input is a signal to pass on; end of file means that the program is gone.
// The signal is repeated, since a server that has only just been started ignores it; one that does not obey
// is pressed harder after 20 s.
const supervisorScript = scriptPath + `
last=$1
shift
exec 5<&0
"$@" </dev/null 5<&- &
pg=$!
(
	while read -r signal; do kill -s "$signal" "$pg"; done
	for signal in "$last" QUIT KILL; do
		n=0
		while [ "$n" -lt 100 ]; do
			kill -s "$signal" "$pg" || exit 0
			sleep 0.2
			n=$((n + 1))
		done
	done
) <&5 3>&- 4>&- 2>/dev/null &
watch=$!
exec 5<&-
trap 'kill -s INT "$pg"' INT TERM HUP
wait "$pg"
status=$?
while kill -s 0 "$pg" 2>/dev/null; do
	wait "$pg"
	status=$?
done
kill "$watch" 2>/dev/null
exit "$status"
`

// janitorScript deletes an ephemeral cluster's directory when the last holder of its input is gone.
// Backends of a killed postmaster may still be writing for a moment: hence the second try.
const janitorScript = scriptPath + `
while read -r _; do :; done
rm -rf -- "$1" 2>/dev/null || { sleep 1; rm -rf -- "$1"; }
`

// supervisorCommand runs postgres under a supervisor on this machine.
func supervisorCommand(acct account, bin binaries, data string, last Signal) *exec.Cmd {
	//nolint:noctx // the pipe ends it
	cmd := exec.Command("/bin/sh", "-c", supervisorScript, "penstock-postgres", string(last), bin.program("postgres"),
		"-D", data)
	cmd.SysProcAttr = acct.attributes()
	cmd.Dir = "/"
	cmd.Env = serverEnvironment()
	return cmd
}

// supervised is one run of a postmaster below its supervisor.
type supervised struct {
	pipe *os.File      // to the supervisor
	done chan struct{} // closed when every process of this run is gone
	err  error         // how the postmaster ended; read it after done
}

// supervise starts a command which waits for its orders, and for the program's end, on standard input.
// Every process of the run inherits hold.
func supervise(cmd *exec.Cmd, hold, log *os.File) (*supervised, error) {
	commands, pipe, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("open pipe to supervisor: %w", err)
	}
	defer commands.Close()
	// Every process of the run inherits alive; its end of file is the only proof that all of them are gone.
	gone, alive, err := os.Pipe()
	if err != nil {
		pipe.Close()
		return nil, fmt.Errorf("open pipe from supervisor: %w", err)
	}
	defer alive.Close()

	cmd.Stdin, cmd.Stdout, cmd.Stderr = commands, log, log
	cmd.ExtraFiles = []*os.File{hold, alive} // descriptors 3 and 4
	if err := cmd.Start(); err != nil {
		pipe.Close()
		gone.Close()
		return nil, fmt.Errorf("start supervisor: %w", err)
	}
	s := &supervised{pipe: pipe, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		s.err = cmd.Wait()
		_, _ = io.Copy(io.Discard, gone)
		gone.Close()
		pipe.Close()
	}()
	return s, nil
}

// signal passes a signal on to the postmaster.
func (s *supervised) signal(sig Signal) error {
	if _, err := s.pipe.WriteString(string(sig) + "\n"); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("signal supervisor: %w", err)
	}
	return nil
}

// stop ends the run with its last signal and waits until it is gone.
func (s *supervised) stop(ctx context.Context) error {
	s.pipe.Close()
	return s.wait(ctx)
}

func (s *supervised) wait(ctx context.Context) error {
	select {
	case <-s.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for postgres to stop: %w", ctx.Err())
	}
}

// startJanitor returns the hold of an ephemeral cluster and a channel closed when its directory is deleted.
// The janitor keeps the user of this process, who made the directory: the server's user might not be allowed
// to delete it.
func startJanitor(dir string) (hold *os.File, deleted chan struct{}, err error) {
	held, hold, err := os.Pipe()
	if err != nil {
		return nil, nil, fmt.Errorf("open pipe to janitor: %w", err)
	}
	defer held.Close()
	cmd := exec.Command("/bin/sh", "-c", janitorScript, "penstock-janitor", dir) //nolint:noctx // the pipe ends it
	cmd.Stdin = held
	cmd.SysProcAttr = account{}.attributes()
	cmd.Dir = "/"
	if err := cmd.Start(); err != nil {
		hold.Close()
		return nil, nil, fmt.Errorf("start janitor: %w", err)
	}
	deleted = make(chan struct{})
	go func() {
		defer close(deleted)
		_ = cmd.Wait() // what it could not delete, the system's own cleaning of temporary files will
	}()
	return hold, deleted, nil
}

// serverEnvironment is this process's without the PG* variables, which would change what the server does.
func serverEnvironment() []string {
	var env []string
	for _, kv := range os.Environ() {
		if len(kv) < 2 || kv[:2] != "PG" {
			env = append(env, kv)
		}
	}
	return env
}
