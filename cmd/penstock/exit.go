package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/penstock/penstock/internal/oneline"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
)

// The exit codes are fixed: scripts rely on them. docs/cli.md lists them too.
const (
	exitDone        = 0
	exitError       = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitState       = 4
	exitFull        = 5
	exitUnavailable = 6
	exitUnconfirmed = 7
	exitTimeout     = 8
	exitEndedBadly  = 9
	exitWarning     = 10
	exitCritical    = 20
	exitInterrupted = 130
)

const exitHelp = `Exit codes:
  0   done                              7   not confirmed
  1   something unforeseen              8   timed out waiting
  2   the command line is wrong         9   an awaited entry did not end well
  3   there is no such thing            10  doctor, verify: warnings
  4   its state does not allow it       20  doctor, verify: critical
  5   a queue or rate is full           130 interrupted
  6   no way to the database or the API, or no right to what was asked there`

// usageError is a mistake in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// partialError is the error of a command that has done a part of its work. Its sentence says which, and is printed
// whatever ended the command.
type partialError struct{ error }

func (e partialError) Unwrap() error { return e.error }

// undecidedError is that of a change which may have been made all the same: no answer came, as where a commit waits for
// a standby for longer than --timeout.
type undecidedError struct{ error }

func (e undecidedError) Unwrap() error { return e.error }

// Errors of the commands themselves.
var (
	errUnconfirmed = errors.New("not confirmed")
	errTimeout     = errors.New("timed out waiting")
)

// exitStatus ends a command that did its work and found something: the output says what.
type exitStatus struct{ code int }

func (s exitStatus) Error() string { return fmt.Sprintf("exit code %d", s.code) }

// seeState is the next step after an error of a state, where the verbs of the noun are not known.
const seeState = "the verb list of the same noun prints its state"

// kinds is the one table from error to exit code, and to what a person should do next. The first that matches counts.
var kinds = []struct {
	is   func(error) bool
	code int
	next string
}{
	{unreadable, exitUsage, "give the path of a file that can be read"},
	{isA[usageError], exitUsage, "the same command with --help lists its arguments and flags"},
	{is(errUnconfirmed), exitUnconfirmed, "give --yes to go ahead without a question, or --dry-run to see what " +
		"would change"},
	{is(errTimeout), exitTimeout, "wait longer with --for, or ask penstock entry explain"},
	{
		is(invalidation.ErrQueueNotFound), exitNotFound,
		"penstock queue list shows the queues; penstock queue create makes one",
	},
	{
		is(invalidation.ErrEntryNotFound), exitNotFound,
		"ids are those that a push answered; outcomes are kept for the queue's result_retention",
	},
	{
		is(invalidation.ErrNotFound), exitNotFound,
		"the verb list of the same noun shows those that exist, as in penstock node list",
	},
	{
		is(invalidation.ErrQueueFull), exitFull,
		"push again later, or raise the capacity: penstock queue alter NAME --set capacity=N",
	},
	{
		problem("rate_exceeded"), exitFull,
		"push again when that time is over, or fewer entries at once; " +
			"penstock token list -o wide shows rates and budgets",
	},
	{
		is(invalidation.ErrNoInstance), exitFull,
		"push again when penstock model list shows a ready instance, or: " +
			"penstock queue alter NAME --set on_no_instance=wait",
	},
	{
		is(invalidation.ErrPayloadTooLarge), exitUsage,
		"store the data elsewhere and push a reference, or raise payload_limit",
	},
	{
		is(invalidation.ErrIdempotencyConflict), exitState,
		"an idempotency key belongs to one payload: use another key for another payload",
	},
	{is(invalidation.ErrInvalid), exitUsage, "the same command with --help lists its arguments and flags"},
	{problem("loop"), exitState, "push without the entry that pushes the others again"},
	{is(invalidation.ErrState), exitState, seeState},
	{
		code("3F000", "42P01", "42883", "42703"), exitState,
		"the schema is missing or not of this version: penstock migrate status, then penstock migrate up",
	},
	{
		isA[*migrations.OldError], exitState,
		"penstock migrate status shows what is missing, penstock migrate up applies it",
	},
	{refusesSettings, exitUnavailable, "a pooler in between refuses settings of sessions: give --database-pooled"},
	{
		code("28P01", "28000", "3D000"), exitUnavailable,
		"check the user, the password and the database in --database-url (PENSTOCK_DATABASE_URL)",
	},
	{
		mayNotConnect, exitUnavailable,
		"the role may not connect to the database: as the owner, penstock grants --apply, or GRANT CONNECT ON DATABASE",
	},
	{
		isA[*migrations.AdminError], exitUnavailable,
		"give the address of a superuser; or as one, ALTER ROLE OWNER CREATEROLE, and for roles that are there " +
			"GRANT ROLE TO OWNER WITH ADMIN OPTION",
	},
	{
		code(postgres.InsufficientPrivilege), exitUnavailable,
		"connect as a role with the duty operator (penstock grants); migrate and grants need the owner of the schema",
	},
	{
		isA[*migrations.OwnerError], exitUnavailable,
		"give the address of the owner in --database-url (PENSTOCK_DATABASE_URL)",
	},
	{
		isA[*migrations.TakenError], exitState,
		"give this installation roles of its own by --prefix, or --replace-passwords if the role is its own",
	},
	{code(postgres.QueryCanceled), exitTimeout, "narrow the filter, or give the statement longer with --timeout"},
	{
		problem("unauthorized", "forbidden", "not_local"), exitUnavailable,
		"check the token in --token-file (PENSTOCK_TOKEN); penstock token list shows what each may do",
	},
	{problem("body_too_slow"), exitTimeout, "push fewer entries at once, or over a faster connection"},
	{problem("timeout"), exitTimeout, "narrow the filter; the server bounds the time of a request"},
	{
		problem("unavailable", "busy", "too_many_waiters", "too_many_requests", "not_yet"), exitUnavailable,
		"try again; the leader's log and /readyz say what is missing",
	},
	{
		unknownAnswer(http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther,
			http.StatusTemporaryRedirect, http.StatusPermanentRedirect), exitUnavailable,
		"give the address that it redirects to in --server (PENSTOCK_SERVER)",
	},
	{
		unknownAnswer(http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout), exitUnavailable,
		"a proxy answered that reached no leader: check that leaders run, and that it may reach them; " +
			"--database-url needs neither",
	},
	{
		problem("unknown", "no_such_address", "method_not_allowed"), exitUnavailable,
		"check --server (PENSTOCK_SERVER): no leader of this version answers there",
	},
	{problem("internal"), exitError, "the leader's log says what went wrong"},
	{lateGateway, exitTimeout, "check --gateway, or give the request longer with --timeout"},
	{
		isA[gatewayError], exitUnavailable,
		"give the address of a gateway's debug listener (gateway.debug_listen) with --gateway",
	},
	{lateAnswer, exitTimeout, "narrow the filter, or give the request longer with --timeout"},
	{
		throughProxy, exitUnavailable,
		"check the proxy in HTTPS_PROXY (HTTP_PROXY for http), or list the server's host in NO_PROXY",
	},
	{
		otherHost, exitUnavailable,
		"give a host that the server's certificate names in --server (PENSTOCK_SERVER)",
	},
	{
		distrusted, exitUnavailable,
		"give the authority that signed the server's certificate in --ca-file (PENSTOCK_CA_FILE); if it has expired " +
			"or is not valid yet, check the clock of this machine",
	},
	{isA[*url.Error], exitUnavailable, "check --server (PENSTOCK_SERVER) and that a leader runs there; " +
		"--database-url needs none"},
	{
		code("25006"), exitUnavailable,
		"the database takes no writes: give the address of the primary in --database-url (PENSTOCK_DATABASE_URL), " +
			"or check default_transaction_read_only",
	},
	{unavailable, exitUnavailable, "check --database-url (PENSTOCK_DATABASE_URL) and that Postgres runs; penstock " +
		"doctor looks further"},
}

// unknownAnswer matches answers with one of these statuses that are no problem documents: a proxy sent them.
func unknownAnswer(statuses ...int) func(error) bool {
	return func(err error) bool {
		var answer *client.Error
		return errors.As(err, &answer) && answer.Code == "unknown" && slices.Contains(statuses, answer.Status)
	}
}

// unreadable says that a file which the command line names is missing, or may not be read.
func unreadable(err error) bool {
	return isA[*fs.PathError](err) && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission))
}

func is(target error) func(error) bool { return func(err error) bool { return errors.Is(err, target) } }

func isA[T error](err error) bool {
	var target T
	return errors.As(err, &target)
}

func refusesSettings(err error) bool { return errors.Is(postgres.ForPooler(err), postgres.ErrPooler) }

func code(states ...string) func(error) bool {
	return func(err error) bool {
		for _, state := range states {
			if postgres.Code(err) == state {
				return true
			}
		}
		return false
	}
}

// mayNotConnect says that the role lacks the right CONNECT on the database.
func mayNotConnect(err error) bool {
	return isA[*pgconn.ConnectError](err) && postgres.Code(err) == postgres.InsufficientPrivilege
}

// sentence is the error's text without the words that only its class adds to a sentence of the database.
func sentence(err error) string {
	text := err.Error()
	for _, sentinel := range []error{invalidation.ErrState, invalidation.ErrInvalid} {
		text = strings.ReplaceAll(text, ": "+sentinel.Error(), "")
	}
	for _, sentinel := range []error{
		invalidation.ErrEntryNotFound, invalidation.ErrNotFound,
		invalidation.ErrQueueNotFound,
	} {
		text = strings.ReplaceAll(text, ".: "+sentinel.Error(), ".")
	}
	return text
}

// shownError is the sentence of an error without control characters, which it may quote. An answer of the API
// is one line.
func shownError(err error) string {
	if isA[refused](err) {
		return oneline.Of(sentence(err))
	}
	lines := strings.Split(sentence(err), "\n")
	for i, line := range lines {
		indent := len(line) - len(strings.TrimLeft(line, "\t"))
		lines[i] = line[:indent] + oneline.Of(line[indent:])
	}
	return strings.Join(lines, "\n")
}

// lateAnswer says that the API did not answer within --timeout.
func lateAnswer(err error) bool {
	return isA[*url.Error](err) && errors.Is(err, context.DeadlineExceeded)
}

// otherHost says that the API's certificate is of another host than that of --server.
func otherHost(err error) bool { return isA[*url.Error](err) && isA[x509.HostnameError](err) }

// distrusted says that the API's certificate is of an unknown authority, or not valid now.
func distrusted(err error) bool {
	return isA[*url.Error](err) && isA[*tls.CertificateVerificationError](err)
}

// throughProxy says that the proxy of the environment could not be reached.
func throughProxy(err error) bool {
	var failed *net.OpError
	return isA[*url.Error](err) && errors.As(err, &failed) && failed.Op == "proxyconnect"
}

// lateGateway says that a gateway did not answer within --timeout.
func lateGateway(err error) bool {
	return isA[gatewayError](err) && errors.Is(err, context.DeadlineExceeded)
}

// unavailable says that the database could not be reached, or refused work for a reason that passes.
func unavailable(err error) bool {
	if postgres.Code(err) != "" {
		return postgres.Unavailable(err)
	}
	return isA[*pgconn.ConnectError](err) || isA[*net.OpError](err) || errors.Is(err, io.ErrUnexpectedEOF)
}

// undecided says that an error leaves open whether a change was made: there was no answer, or one of a server that does
// not know it either.
func undecided(err error) bool {
	var answer *client.Error
	var failed *net.OpError
	code := postgres.Code(err)
	switch {
	case err == nil, errors.Is(err, invalidation.ErrNoInstance):
		return false
	case errors.As(err, &answer):
		return problem("unknown", "timeout", "unavailable", "internal")(err)
	case isA[*pgconn.ConnectError](err), otherHost(err), distrusted(err), throughProxy(err),
		errors.As(err, &failed) && failed.Op == "dial": // nothing was sent
		return false
	case code != "": // the server refused it, unless it ended the session, perhaps while the commit waited
		return strings.HasPrefix(code, "08") || strings.HasPrefix(code, "57P")
	}
	return isA[*url.Error](err) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		postgres.Disconnected(err)
}

// report writes what went wrong and what to do next, and returns the exit code.
func (a *app) report(ctx context.Context, err error) int {
	var found exitStatus
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &found):
		return found.code
	case ctx.Err() != nil:
		partial := isA[partialError](err)
		if partial {
			fmt.Fprintln(a.err, a.paint(red, "penstock:"), shownError(err))
		}
		fmt.Fprintln(a.err, "penstock: interrupted")
		if isA[undecidedError](err) && !partial {
			fmt.Fprintln(a.err, "next:", a.lookFirst())
		}
		return exitInterrupted
	}
	fmt.Fprintln(a.err, a.paint(red, "penstock:"), shownError(err))
	code, next := kindOf(err)
	if next == seeState {
		next = cmp.Or(a.seeState, next)
	}
	if isA[undecidedError](err) {
		next = a.lookFirst()
	}
	if next != "" {
		fmt.Fprintln(a.err, "next:", next)
	}
	return code
}

// lookFirst is the next step after an undecidedError.
func (a *app) lookFirst() string {
	return "whether it was done is not known: " + cmp.Or(a.seeState, "see that") + "; look before you repeat it"
}

// kindOf looks err up in the table: its exit code, and what to do next, which may be empty.
func kindOf(err error) (code int, next string) {
	for _, k := range kinds {
		if k.is(err) {
			return k.code, k.next
		}
	}
	return exitError, ""
}

// stateVerbs is the next step after an error of a state: the commands beside c that print the state of its object. It
// is empty where there is none.
func stateVerbs(c *cobra.Command) string {
	var prints []string
	for _, beside := range c.Parent().Commands() {
		if name := beside.Name(); name == "show" || name == "explain" {
			prints = append(prints, beside.CommandPath())
		}
	}
	switch list, _, err := c.Parent().Find([]string{"list"}); {
	case len(prints) > 1:
		return strings.Join(prints, " and ") + " print its state"
	case len(prints) == 1:
		return prints[0] + " prints its state"
	case err == nil && list.Name() == "list":
		return list.CommandPath() + " prints its state"
	}
	return ""
}
