// Command sbom reads what `go version -m -json` says of a program and prints the modules in it as a CycloneDX
// 1.5 bill of materials. It has neither a time nor a serial number, so that the same program gives the same
// bytes.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
)

type component struct {
	Type    string `json:"type"`
	Ref     string `json:"bom-ref"`
	Name    string `json:"name"`
	Version string `json:"version"`
	PURL    string `json:"purl,omitempty"`
}

type bill struct {
	Format     string      `json:"bomFormat"`
	Spec       string      `json:"specVersion"`
	Version    int         `json:"version"`
	Metadata   metadata    `json:"metadata"`
	Components []component `json:"components"`
}

type metadata struct {
	Component component `json:"component"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("want the name and version of the program, and the output of go version -m -json as input")
	}
	var info debug.BuildInfo
	if err := json.NewDecoder(os.Stdin).Decode(&info); err != nil {
		return fmt.Errorf("read build information: %w", err)
	}
	return json.NewEncoder(os.Stdout).Encode(billOf(args[0], args[1], info))
}

func billOf(program, version string, info debug.BuildInfo) bill {
	b := bill{Format: "CycloneDX", Spec: "1.5", Version: 1}
	b.Metadata.Component = component{Type: "application", Ref: program, Name: program, Version: version}
	b.Components = []component{{
		Type: "library", Ref: "std", Name: "std", Version: strings.TrimPrefix(info.GoVersion, "go"),
		PURL: "pkg:golang/std@" + strings.TrimPrefix(info.GoVersion, "go"),
	}}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		purl := "pkg:golang/" + m.Path + "@" + m.Version
		b.Components = append(b.Components,
			component{Type: "library", Ref: purl, Name: m.Path, Version: m.Version, PURL: purl})
	}
	return b
}
