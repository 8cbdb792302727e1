package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/gateway"
)

// gatewayStatus is what a gateway's /status answers.
type gatewayStatus struct {
	Name     string              `json:"name"`
	Degraded bool                `json:"degraded"`
	Pools    []gateway.PoolState `json:"pools"`
}

func gatewayCommand(a *app) *cobra.Command {
	c := noun("gateway", "Online gateways: pools, and what happened to a request", gatewayPools(a), gatewayExplain(a),
		gatewayPolicies(a), gatewaySet(a))
	c.PersistentFlags().String("gateway", "http://127.0.0.1:8431", "address of a gateway's debug listener")
	return c
}

func (a *app) poolColumns() []column[gateway.PoolState] {
	count := func(of func(gateway.PoolState) int) func(gateway.PoolState) string {
		return func(p gateway.PoolState) string { return fmt.Sprint(of(p)) }
	}
	waiting := func(class string) func(gateway.PoolState) string {
		return count(func(p gateway.PoolState) int { return p.Waiting[class] })
	}
	return []column[gateway.PoolState]{
		{title: "MODEL", text: func(p gateway.PoolState) string { return p.Model }},
		{title: "MODE", text: func(p gateway.PoolState) string { return p.Mode }},
		{title: "STOCK", right: true, text: count(func(p gateway.PoolState) int { return p.Stock })},
		{title: "CEILING", right: true, text: count(func(p gateway.PoolState) int { return p.Ceiling })},
		{title: "CRITICAL", right: true, text: waiting("critical")},
		{title: "DEFAULT", right: true, text: waiting("default")},
		{title: "SHEDDABLE", right: true, text: waiting("sheddable")},
		{title: "FLOWS", right: true, text: count(func(p gateway.PoolState) int { return p.Flows })},
		{title: "DROPPED", right: true, text: func(p gateway.PoolState) string {
			var all int64
			for _, n := range p.Dropped {
				all += n
			}
			return number(all)
		}},
		{title: "INSTANCES", wide: true, text: func(p gateway.PoolState) string {
			var list []string
			for _, i := range p.Instances {
				list = append(list, fmt.Sprintf("%s %d/%d (limit %d)", i.Server, i.Flying, i.Held, i.Limit))
			}
			return strings.Join(list, ", ")
		}},
	}
}

func gatewayPools(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Args: cobra.NoArgs,
		Short: "Pools of one gateway: calls in flight, waiting requests by class, mode",
	}
	return listing(a, c, a.poolColumns(), func(ctx context.Context, _ conn, _ []string) ([]gateway.PoolState, error) {
		var s gatewayStatus
		if err := askGateway(ctx, c, "/status", &s); err != nil {
			return nil, err
		}
		return s.Pools, nil
	})
}

func gatewayExplain(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "explain REQUEST", Args: cobra.ExactArgs(1),
		Short: "Why one of the last requests waited, where it went, and how it ended",
		Long:  "REQUEST is the x-request-id of the answer. A gateway remembers its last 10,000 requests.",
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		var e gateway.RequestRecord
		if err := askGateway(c.Context(), c, "/explain/"+url.PathEscape(args[0]), &e); err != nil {
			return err
		}
		if a.format != "table" && a.format != "wide" {
			return json.NewEncoder(a.out).Encode(e)
		}
		return writeExplanation(a.out, e)
	}
	return c
}

// writeExplanation tells what happened to a request, in the order in which it did.
func writeExplanation(w io.Writer, e gateway.RequestRecord) error {
	way := fmt.Sprintf("it waited %.1f ms behind %d requests in mode %s", e.QueueMS, e.Trace.Ahead, e.Trace.Mode)
	if e.Trace.Bypassed {
		way = "it passed the queue by"
	}
	fmt.Fprintf(w, "%s  model %s, flow %q, class %s, token %q\n", e.ID, e.Model, e.Flow, e.Class, e.Token)
	fmt.Fprintf(w, "admission  %s\n", way)
	fmt.Fprintf(w, "fairness   start tag %.1f, virtual time %.1f, estimated cost %.1f ms\n", e.Trace.Start,
		e.Trace.Virtual, e.Trace.Estimate)
	if e.Trace.Dropped != "" {
		fmt.Fprintf(w, "dropped    %s\n", e.Trace.Dropped)
	} else {
		fmt.Fprintf(w, "call       %s, attempt %d, slot kept for %.1f ms\n", e.Server, e.Attempts, e.Trace.CostMS)
	}
	_, err := fmt.Fprintf(w, "end        status %d after %.1f ms%s\n", e.Status, e.TookMS, after(": ", e.Error))
	return err
}

// askGateway reads one page of a gateway's debug listener.
func askGateway(ctx context.Context, c *cobra.Command, path string, into any) error {
	base, err := c.Flags().GetString("gateway")
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(base, "/")+path, nil)
	if err != nil {
		return usagef("--gateway: %s", err.Error())
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("ask gateway: %w; give the address of its debug listener with --gateway", err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, 64<<20))
	if err != nil {
		return fmt.Errorf("ask gateway: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return errors.New(strings.TrimSpace(string(body)))
	}
	return json.Unmarshal(body, into)
}
