//! Tests of access files.

use super::*;

const HASH: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

#[test]
fn valid_file() {
    let text = format!(
        "callers:
  - name: shop
    description: the shop's backends
    token_sha256: [{HASH}, \"{}\"]
    namespaces: [shop, 'cart-*']
    max_resources: 20
  - {{ name: ops, role: administer, certificates: ['cn:Ops', 'uri:spiffe://x/*', 'dns:*.Example'] }}
  - {{ name: rest, role: observe, anyone: true, namespaces: ['*'], resources: ['*'] }}
  - {{ name: 'a[b*', certificates: ['cn:a'], resources: ['*'], domains: ['t-*', acme], client_ids: 'x/{{caller}}/*', lend: {{ max_clients: 7 }} }}
",
        HASH.to_uppercase().replace('B', "C")
    );
    let callers = parse(&text).unwrap();
    let shown: Vec<_> =
        callers.iter().map(|c| (&*c.name, c.role, c.anyone, c.everything)).collect();
    assert_eq!(
        shown,
        [
            ("shop", Role::Ask, false, false),
            ("ops", Role::Administer, false, true),
            ("rest", Role::Observe, true, true),
            ("a[b*", Role::Ask, false, false)
        ]
    );
    assert_eq!(
        (callers[0].tokens[0][..2].to_vec(), callers[0].tokens[1][0]),
        (vec![0xba, 0x78], 0xca)
    );
    let restricted = &callers[3];
    assert_eq!((callers[0].lend, restricted.lend, &callers[0].client_ids), (None, Some(7), &None));
    let domains = ["t-1", "acme", "t/1", "globex"];
    assert_eq!(
        domains.map(|domain| restricted.domains.iter().any(|glob| glob.matches(domain))),
        [true, true, false, false]
    );
    assert!(callers[0].domains[0].is_everything());
    let ids = restricted.client_ids.as_ref().unwrap();
    let names = ["x/a[b*/1", "x/a[b*/", "x/a[bc/1", "a[b*/1", "x/a[b*/1/2"];
    assert_eq!(names.map(|id| ids.matches(id)), [true, true, false, false, false]);
    assert_eq!((callers[0].max_resources, callers[2].max_resources), (Some(20), None));
    assert!(callers[0].namespaces[1].matches("cart-a") && callers[0].resources.is_empty());
    assert!(callers[1].certificates[1].matches("uri:spiffe://x/y"));
    assert!(!callers[1].certificates[0].matches("dns:ops"));
    assert!(callers[1].certificates[0].matches("cn:Ops"));
    assert!(!callers[1].certificates[0].matches("cn:ops"));
    assert!(callers[1].certificates[2].matches("dns:ops.example"));
    assert!(!callers[1].certificates[2].matches("dns:eu.ops.example"), "as in certificates");
}

#[test]
fn ineffective_lease_permissions_are_faults() {
    let text = "callers:
  - { name: a, role: administer, certificates: ['cn:a'], lend: { max_clients: 1 } }
  - { name: b, role: observe, certificates: ['cn:b'], resources: ['*'], client_ids: b }
  - { name: c, certificates: ['cn:c'], namespaces: ['*'], lend: { max_clients: 1 } }
  - { name: d, certificates: ['cn:d'], resources: ['*'], lend: {} }
  - { name: e, certificates: ['cn:e'], resources: ['*'], lend: 10 }
  - { name: f, certificates: ['cn:f'], resources: ['*'], lend: { max_clients: 0 } }
  - { name: g, certificates: ['cn:g'], resources: ['*'], lend: { max_clients: 1000000001 } }
  - { name: h, certificates: ['cn:h'], resources: ['*'], client_ids: '[' }
  - { name: i, certificates: ['cn:i'], resources: ['*'], client_ids: ['a'] }
  - { name: j, role: observe, certificates: ['cn:j'], resources: ['*'], max_resources: 5 }
  - { name: k, role: observe, certificates: ['cn:k'], resources: ['*'], domains: [a] }
  - { name: l, certificates: ['cn:l'], namespaces: ['*'], domains: ['['] }
";
    let expected =
        "line 2: callers[0].lend: has no effect: who administers may do everything; remove it
line 3: callers[1].client_ids: has no effect: who observes leases nothing; remove it
line 4: callers[2].lend: has no effect without resources: say what it may use
line 5: callers[3].lend.max_clients: is missing: the most clients that the caller may speak for
line 6: callers[4].lend: must be a mapping: { max_clients: 10000 }, not 10
line 7: callers[5].lend.max_clients: must be a whole number of at least 1, not 0
line 8: callers[6].lend.max_clients: must be a whole number of at most 1000000000, not 1000000001
line 9: callers[7].client_ids: has a [ without its ]: write \\[ for the character itself
line 10: callers[8].client_ids: must be a glob, such as \"{caller}/*\", not a list
line 11: callers[9].max_resources: has no effect: who observes leases nothing; remove it
line 12: callers[10].domains: has no effect: who observes requests no hits; remove it
line 13: callers[11].domains[0]: has a [ without its ]: write \\[ for the character itself
line 13: callers[11].domains: has no effect without resources: say what it may use";
    assert_eq!(parse(text).unwrap_err().to_string(), expected);
}

#[test]
fn all_faults_are_reported_without_tokens() {
    let text = format!(
        "callers:
  - {{ name: a, token_sha256: [hunter2], namespaces: [x] }}
  - {{ name: a, token_sha256: [{HASH}, {HASH}] }}
  - {{ role: administer, certificates: [ops, 'cn:['], resources: [x] }}
  - {{ name: b c, anyone: true, role: administer }}
  - {{ name: d, anyone: true, resources: [x], role: asks, tokens: [hunter2] }}
  - {{ name: e, namespaces: [x] }}
  - {{ name: f, anyone: false, resources: [x], max_resources: 0 }}
"
    );
    let faults = parse(&text).unwrap_err().to_string();
    let expected = "line 2: callers[0].token_sha256[0]: must be the SHA-256 of a token in 64 hexadecimal digits, as `tollgate token` prints it; not the token itself
line 3: callers[1].name: \"a\" is already on line 2
line 3: callers[1].token_sha256[1]: is already on line 3: whose token is it?
line 3: callers[1]: may do nothing: give it namespaces or resources, [\"*\"] is all
line 4: callers[2].name: is missing: logs call the caller by it
line 4: callers[2].certificates[0]: must begin with dns:, uri: or cn:, which says what kind of name it is
line 4: callers[2].certificates[1]: has a [ without its ]: write \\[ for the character itself
line 4: callers[2].resources: has no effect: who administers may do everything; remove it
line 5: callers[3].name: has white space or a control character at byte 1
line 5: callers[3].anyone: can't administer: give it a token
line 6: callers[4].tokens: unknown key \"tokens\", the keys known here are name, role, token_sha256, certificates, anyone, namespaces, resources, domains, client_ids, lend, max_resources, shared, description
line 6: callers[4].role: must be one of ask, observe, administer, not \"asks\": did you mean ask?
line 6: callers[4].anyone: is already on line 5
line 7: callers[5]: can't be told from others: give it token_sha256 or certificates
line 8: callers[6].max_resources: must be a whole number of at least 1, not 0";
    assert_eq!(faults, expected);
    assert!(!faults.contains("hunter2"));
    for (text, fault) in [
        ("{}", "line 1: callers: is missing: nobody could ask"),
        ("[]", "line 1: must be a mapping"),
        ("callers: 5", "line 1: callers: must be a list, not 5"),
    ] {
        let found = parse(text).unwrap_err().to_string();
        assert!(found.starts_with(fault), "{found}");
    }
    assert_eq!(parse("callers: []"), Ok(Vec::new()), "nobody may ask, which is said");
}
