package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/internal/oneline"
	"github.com/penstock/penstock/pkg/doctor"
)

func doctorCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "doctor", Args: cobra.NoArgs,
		Short: "Examine the database and the programs on it; exit code 10 for warnings, 20 for critical findings",
		Long: `Examine settings (durability, isolation, clock), causes that keep vacuum from cleaning, the schema,
partitions, the leader, late entries, stuck locks, unserved queues, and the invariants, and print advice for each
finding. It only reads, and each check is bounded in time.`,
	}
	var cfg doctor.Config
	var quiet bool
	c.Flags().BoolVar(&cfg.Deep, "deep", false, "check the invariants however many rows must be read")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "say nothing about what is fine")
	c.RunE = func(c *cobra.Command, _ []string) error {
		findings, err := a.examine(c.Context(), cfg)
		if err != nil {
			return err
		}
		if err := a.writeFindings(findings, quiet); err != nil {
			return err
		}
		return severityExit(doctor.Worst(findings))
	}
	return c
}

// examine runs the checks on the database, or has the server run them.
func (a *app) examine(ctx context.Context, cfg doctor.Config) ([]doctor.Finding, error) {
	if a.server != "" {
		if cfg.Deep {
			return nil, usagef("--deep reads every row, for minutes: it works only on the database, with " +
				"--database-url (PENSTOCK_DATABASE_URL)")
		}
		api, err := a.connect(ctx)
		if err != nil {
			return nil, err
		}
		return unpaged[doctor.Finding](ctx, api, "/v1/doctor", pageMax)
	}
	db, err := a.database(ctx)
	if err != nil {
		return nil, err
	}
	cfg.Now = a.now
	// This check runs outside the transaction of the others, on a second connection.
	cfg.Schema = func(ctx context.Context) (doctor.Finding, error) { return doctor.Schema(ctx, db) }
	return doctor.Examine(ctx, db, cfg)
}

func severityExit(s doctor.Severity) error {
	switch s {
	case doctor.Critical:
		return exitStatus{exitCritical}
	case doctor.Warning:
		return exitStatus{exitWarning}
	}
	return nil
}

func (a *app) writeFindings(findings []doctor.Finding, quiet bool) error {
	if !a.tabular() {
		return printList[doctor.Finding](a, nil, findings)
	}
	counts := map[doctor.Severity]int{}
	for _, f := range findings {
		counts[f.Severity]++
		if !quiet || (f.Severity != doctor.Fine && f.Severity != doctor.Skipped) {
			a.writeFinding(a.out, f)
		}
	}
	fmt.Fprintf(a.out, "\n%d critical, %s, %d fine", counts[doctor.Critical],
		many(counts[doctor.Warning], "warning", "warnings"), counts[doctor.Fine])
	if n := counts[doctor.Skipped]; n > 0 {
		fmt.Fprintf(a.out, ", %d skipped", n)
	}
	fmt.Fprintln(a.out)
	return nil
}

func (a *app) writeFinding(w io.Writer, f doctor.Finding) {
	severity := string(f.Severity)
	fmt.Fprintf(w, "%s%s  %-16s %s\n", a.paint(cellColours[severity], severity),
		strings.Repeat(" ", max(0, 8-len(severity))), f.Check, oneline.Of(f.Summary))
	if f.Severity == doctor.Fine {
		return // what is fine needs no evidence
	}
	for _, d := range f.Details {
		fmt.Fprintf(w, "%27s- %s\n", "", oneline.Of(d))
	}
	if f.Advice != "" {
		fmt.Fprintf(w, "%27s%s %s\n", "", a.paint(bold, "do:"), f.Advice)
	}
}
