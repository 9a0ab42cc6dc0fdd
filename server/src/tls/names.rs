//! The names and the expiry of a certificate.

use rustls::pki_types::CertificateDer;
use x509_cert::Certificate;
use x509_cert::der::asn1::{PrintableStringRef, Utf8StringRef};
use x509_cert::der::oid::db::rfc4519::COMMON_NAME;
use x509_cert::der::{Decode, Tag, Tagged};
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

/// When the certificate expires, in seconds since the epoch; `None` if it can't be parsed.
pub(super) fn expiry_s(certificate: &CertificateDer<'_>) -> Option<u64> {
    let certificate = Certificate::from_der(certificate).ok()?;
    Some(certificate.tbs_certificate.validity.not_after.to_unix_duration().as_secs())
}

/// The certificate's names, each prefixed with its kind: `dns:` (lowercased, as DNS names are
/// case-insensitive) and `uri:` from the subject alternative names, `cn:` from the subject. Empty
/// if the certificate can't be parsed.
pub(super) fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = Certificate::from_der(certificate) else { return Vec::new() };
    let certificate = certificate.tbs_certificate;
    let mut names = Vec::new();
    if let Ok(Some((_, SubjectAltName(alternatives)))) = certificate.get::<SubjectAltName>() {
        names.extend(alternatives.iter().filter_map(|name| match name {
            GeneralName::DnsName(name) => {
                Some(format!("dns:{}", name.as_str().to_ascii_lowercase()))
            }
            GeneralName::UniformResourceIdentifier(name) => Some(format!("uri:{name}")),
            _ => None,
        }));
    }
    let attributes = certificate.subject.0.iter().flat_map(|rdn| rdn.0.iter());
    for attribute in attributes.filter(|attribute| attribute.oid == COMMON_NAME) {
        let value = &attribute.value;
        let text = match value.tag() {
            Tag::Utf8String => value.decode_as::<Utf8StringRef<'_>>().map(|t| t.to_string()),
            _ => value.decode_as::<PrintableStringRef<'_>>().map(|t| t.to_string()),
        };
        names.extend(text.ok().map(|text| format!("cn:{text}")));
    }
    names
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    #[test]
    fn names_and_expiry() {
        let mut params = CertificateParams::new(vec!["A.Example".to_owned()]).unwrap();
        params.subject_alt_names.push(SanType::URI("spiffe://x/Shop".try_into().unwrap()));
        params.subject_alt_names.push(SanType::IpAddress([127, 0, 0, 1].into()));
        params.distinguished_name.push(DnType::CommonName, "shöp");
        params.distinguished_name.push(DnType::OrganizationName, "nobody");
        params.not_after = rcgen::date_time_ymd(2033, 5, 18);
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let der = certificate.der();
        assert_eq!(names(der), ["dns:a.example", "uri:spiffe://x/Shop", "cn:shöp"]);
        assert_eq!(expiry_s(der), Some(2_000_000_000 - 12_800));
        let malformed = CertificateDer::from(vec![1, 2, 3]);
        assert_eq!((names(&malformed), expiry_s(&malformed)), (Vec::new(), None));
    }
}
